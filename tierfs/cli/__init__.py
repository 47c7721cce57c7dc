"""The command line: one file per command.

Owns: words, tables, progress bars, exit codes. A command turns its arguments into settings or into requests
on the control channel; it holds no logic of the file system.

Imports: a command file imports typer and the standard library at its top, and everything else inside the
command, so that ``tierfs --help`` stays under 150 ms.

Raises: commands let ``TierfsError`` out; ``main`` prints its message as ``tierfs: ...`` and exits with the
code that belongs to it (``exit_codes``).
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of ``tierfs``, ``mount.tierfs`` and ``python -m tierfs``. Does not return."""
    from tierfs.cli import mount_helper

    if mount_helper.is_meant(sys.argv):
        sys.exit(mount_helper.main(sys.argv[1:]))
    from tierfs.cli.app import run

    code = run()
    # A pipe whose reader has left shows up at the last flush, as a traceback, unless it is asked for here.
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
