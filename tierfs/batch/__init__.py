"""Many files of a mount at once, without FUSE: for data loaders in the container of the mount.

``read_many(paths)`` returns the bytes of all files, ``open_many(paths)`` their sizes first and the bytes
later. What a tier of a mount of this user has is read from there, by io_uring and without a request to the
mount; all the rest is read through the mount (or from whatever file system the path lies on) by open and
read. Either way the bytes are those that open and read would have returned at some moment during the call.

Through the mount go, and ``status().files`` counts them by these names:

===================  ====================================================================================
``outside``          not on a mount that can be read directly; ``status().mounts`` says why not
``elsewhere``        a path with ``..`` or an empty part
``unknown_name``     no valid record of the name: it does not exist, was never listed, or the time is over
``not_a_file``       a directory, or a symbolic link, also on the way
``being_written``    written here and not in the store yet
``no_access``        the mode bits do not let this user read it, or are not known (the mount decides)
``absent``           not all of it is in a tier, or only since less than the half second after which a tier
                     commits its index
``unverified``       in a tier since before an unclean reboot, and not read since
``changed``          written, renamed or evicted during the call
``unreadable``       a tier failed, or its bytes do not match their checksum
``replaced``         the name means another file than when ``open_many`` was called
``opened``           was not to be had directly when ``open_many`` was called, and is kept open since
===================  ====================================================================================

Who may call: any thread, several at once. After a fork the child makes its own connections at its first call;
nothing has to be closed before. A process that runs an engine must not call this for its own mount.

Not seen: stores into a shared writable mapping of a file that was clean, until they are written back (msync).
The engine does not learn of these reads: its eviction policy does not count them as hits.

Raises: ``OSError`` as open and read do, with the path; ``ValueError`` for a buffer that is too small.
"""

from __future__ import annotations

from tierfs.batch.files import OpenFiles, open_many, read_many
from tierfs.batch.status import MountStatus, Status, status

__all__ = ["MountStatus", "OpenFiles", "Status", "open_many", "read_many", "status"]
