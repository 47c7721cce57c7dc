"""``tierfs unpin``"""

from __future__ import annotations

from tierfs.cli import paths as many
from tierfs.cli.target import JsonOption


def command(paths: many.PathsArgument, as_json: JsonOption = False) -> None:
    """Let pinned files be evicted again."""
    from tierfs.control.protocol import UnpinRequest

    many.run("unpin", "unpinned", paths, lambda batch: UnpinRequest(paths=batch), as_json=as_json)
