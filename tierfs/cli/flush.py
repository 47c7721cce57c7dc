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
    """Wait until everything that was written (below PATH) is in the store."""
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
    if reply.remaining_files or reply.failed:
        raise typer.Exit(exit_codes.PARTLY)
