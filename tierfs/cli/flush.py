"""``tierfs flush``"""

from __future__ import annotations

from typing import Annotated

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.target import JsonOption, MountArgument


def command(
    path: MountArgument = None,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after this time (30, 5m...); exit code 5.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until everything that was written (below PATH) before now is in the store."""
    from tierfs.cli import output, timing
    from tierfs.control.protocol import FlushRequest

    found = target.find(path)
    request = FlushRequest(path=found.relative, timeout_s=timing.seconds(timeout))
    with target.engine_of(found) as engine, output.progress("upload", quiet=as_json) as update:
        reply = engine.call("flush", request, update)
    if as_json:
        output.show_json(reply)
    else:
        if reply.flushed_files:
            print(f"{output.files(reply.flushed_files)} ({output.size(reply.flushed_bytes)}) uploaded")
        output.list_failures(reply.failed)
        if reply.remaining_files:
            output.say(
                f"not in the store yet: {output.files(reply.remaining_files)} "
                f"({output.size(reply.remaining_bytes)})"
            )
        if reply.open_files:
            output.say(f"open for writing, so not waited for: {output.files(reply.open_files)} of them")
        if reply.remaining_deletes:
            output.say(f"removed, and still in the store: {output.files(reply.remaining_deletes)}")
    if reply.remaining_files or reply.remaining_deletes or reply.failed:
        raise typer.Exit(exit_codes.PARTLY)
