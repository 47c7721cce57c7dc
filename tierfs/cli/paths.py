"""What ``pin``, ``unpin`` and ``evict`` share: the same request for many paths, and one summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierfs.cli import exit_codes, target

if TYPE_CHECKING:
    from tierfs.control.protocol import PathsReply

PathsArgument = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="Files and directories on the mount.")
]


def run(
    operation: str, done: str, paths: list[str], request: Callable[[list[bytes]], Any], *, as_json: bool
) -> None:
    """Send ``request(paths)`` to each mount concerned and print the sum. ``done``: "pinned", "freed"..."""
    from tierfs.cli import output
    from tierfs.control.protocol import MAX_FAILURES, PathsReply

    total = PathsReply(files=0, bytes=0)
    for found, relative in target.group(paths):
        with target.engine_of(found) as engine, output.progress(operation, quiet=as_json) as update:
            for batch in target.batches(relative):
                reply: PathsReply = engine.call(operation, request(batch), update)
                total.files += reply.files
                total.bytes += reply.bytes
                total.failed = [*total.failed, *reply.failed][:MAX_FAILURES]
    if as_json:
        output.show_json(total)
    else:
        print(f"{output.files(total.files)}, {output.size(total.bytes)} {done}")
        output.list_failures(total.failed)
    if total.failed:
        raise typer.Exit(exit_codes.PARTLY)
