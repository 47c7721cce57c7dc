"""Removing objects of a directory store, and the directories that existed only for them.

An object is unlinked under the lock that other processes honour too (``Place.exclusive``), so that with
``if_match`` it is that version which goes. Directories that appeared with the first key below them go with
the last; those that are marker objects, or have something in them, stay.

Any thread; blocks for as long as the file system takes.

Raises ``PreconditionFailed`` if another version is there, and what ``Place.failure`` makes of an
``OSError``. What is not there is no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from tierfs.errors import PreconditionFailed
from tierfs.store.keys import encode_path
from tierfs.store.local_files import fsync_directory, open_directory
from tierfs.store.local_meta import MetadataKeeper, Record
from tierfs.store.local_place import Place
from tierfs.store.local_walk import etag_of


class Removal:
    """See the module docstring."""

    def __init__(self, place: Place, meta: MetadataKeeper) -> None:
        self._place = place
        self._meta = meta

    def delete(self, key: str, if_match: str | None) -> bytes | None:
        """Remove it; returns the (relative) directory that lost an entry, still to be synced and pruned.

        With ``if_match`` raises ``PreconditionFailed`` if the object there is another version.
        """
        path = self._place.path(key)
        if path is None:
            return None
        directory, _, name = path.rstrip(b"/").rpartition(b"/")
        full = self._place.full(directory)
        try:
            parent = open_directory(full)
        except (FileNotFoundError, NotADirectoryError):
            self._place.check(key)
            return None
        except OSError as error:
            self._place.failure(error, key, "delete", writing=True)
        try:
            self._place.prepare()
            with self._place.exclusive():
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) != key.endswith("/"):
                    return None
                etag = etag_of(status)
                if if_match is not None and not self._is_version(key, path, status, if_match):
                    return None
                if not key.endswith("/"):
                    os.unlink(name, dir_fd=parent)
                    self._meta.drop(None, key, etag)
                elif not self._remove_empty(parent, name):
                    self._meta.save(full + b"/" + name, key, etag, Record(implicit=True))
                else:
                    self._meta.drop(None, key, etag)
            return directory
        except FileNotFoundError:
            return None
        except OSError as error:
            self._place.failure(error, key, "delete", writing=True)
        finally:
            os.close(parent)

    def _is_version(self, key: str, path: bytes, status: os.stat_result, if_match: str) -> bool:
        """Raises ``PreconditionFailed`` if another object is there; False: what is there is no object."""
        full = self._place.full(path)
        shown = self._place.stat_link(path) if stat.S_ISLNK(status.st_mode) else status
        if shown is None or (key.endswith("/") and self._meta.load(full, key, etag_of(status)).implicit):
            return False
        if etag_of(shown) != if_match:
            raise PreconditionFailed(f"{key}: is version {etag_of(shown)}, not {if_match}")
        return True

    @staticmethod
    def _remove_empty(parent: int, name: bytes) -> bool:
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def sync_and_prune(self, directories: set[bytes]) -> None:
        """Make deletions durable, and remove directories that existed only for what was in them."""
        for directory in directories:
            while True:
                full = self._place.full(directory)
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    fsync_directory(full)
                if not directory:
                    break
                with self._place.exclusive():
                    try:
                        etag = etag_of(os.lstat(full))
                        key = encode_path(directory + b"/")
                        if not self._meta.load(full, key, etag).implicit:
                            break
                        os.rmdir(full)
                        self._meta.drop(None, key, etag)
                    except OSError:
                        break  # not empty, or gone
                directory = directory.rpartition(b"/")[0]
