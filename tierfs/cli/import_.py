"""``tierfs import``"""

from __future__ import annotations

from typing import Annotated

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.target import JsonOption


def command(
    prefix: Annotated[
        str | None,
        typer.Argument(metavar="[PREFIX]", help="A directory on the mount; without, all of the only mount."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="LIST requests at a time.", min=1, max=256)] = 16,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Also ask for mode, owner, mtime: one HEAD each.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List everything in the bucket (below PREFIX) now, in parallel, so that later lookups are local."""
    from tierfs.cli import output
    from tierfs.control.protocol import ImportRequest

    found = target.find(prefix)
    with target.engine_of(found) as engine, output.progress("import", quiet=as_json) as update:
        request = ImportRequest(prefix=found.relative, jobs=jobs, metadata=metadata)
        reply = engine.call("import", request, update)
    if as_json:
        output.show_json(reply)
    else:
        print(
            f"{reply.entries} entries in {reply.directories} directories, {reply.requests} requests, "
            f"{output.duration(reply.elapsed_s)}"
        )
        if reply.hidden_keys:
            output.say(f"{reply.hidden_keys} keys cannot be shown as paths and stay hidden; see the log")
        output.list_failures(reply.failed)
    if reply.failed:
        raise typer.Exit(exit_codes.PARTLY)
