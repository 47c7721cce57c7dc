"""A campaign of faults: writers that log what was acknowledged, something that strikes, and the check afterwards.

======== ==================================================================================================
content  bytes that say which file, which write and which place they belong to
writer   a process that writes below one directory and logs each call before and after (a program)
history  what such a log allows a directory to hold after a crash, and after a power cut
arena    what an episode takes place in: a fake S3 server, disks, a mount; with everything cleaned up
strikes  what goes wrong, by name
run      episodes of several strikes; the program behind ``make faults``
======== ==================================================================================================

What is random comes from one seed, but for the moments: processes run as they run. So a seed says what was tried,
and repeats a failure only if that does not hang on a moment.
"""
