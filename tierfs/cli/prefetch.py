"""``tierfs prefetch``"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.target import JsonOption
from tierfs.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierfs.control.client import ControlClient
    from tierfs.control.protocol import PrefetchReply, Progress

MAX_LISTED = 100


def command(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Files and directories on the mount.")
    ] = None,
    list_file: Annotated[
        str | None,
        typer.Option(
            "--list", metavar="FILE", help="Read more paths from FILE, one a line; - is standard input."
        ),
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="Paths in FILE end in NUL, as find -print0.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait, with progress; exit code 5 if anything failed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch files, and everything below directories, into the tiers.

    Relative paths start at the current directory; if that is not on the mount, at the root of the only one.
    """
    from tierfs.cli import output

    given = list(paths or [])
    if list_file is not None:
        given += _read_list(list_file, null)
    if not given:
        raise ConfigError("prefetch: name at least one PATH, or --list FILE")
    total = _nothing()
    for found, relative in target.group([_on_mount(path) for path in given]):
        with (
            target.engine_of(found) as engine,
            output.progress("prefetch", quiet=as_json or not wait) as update,
        ):
            for batch in target.batches(relative):
                _add(total, _call(engine, batch, wait, total, update))
    if as_json:
        output.show_json(total)
    elif not wait:
        print("started; 'tierfs status' shows the tiers fill")
    else:
        print(
            f"{output.files(total.total_files)}, {output.size(total.total_bytes)}: "
            f"{output.size(total.cached_bytes)} cached, {output.size(total.failed_bytes)} failed, "
            f"{output.size(total.evicted_bytes)} evicted, {output.size(total.skipped_bytes)} skipped"
        )
        output.list_failures(total.failed, total.failed_files)
        if total.evicted_bytes or total.skipped_bytes:
            output.say("the tiers are too small to hold all of it")
    if wait and (total.failed_files or total.failed or total.failed_bytes):
        raise typer.Exit(exit_codes.PARTLY)


def _call(
    engine: ControlClient,
    batch: list[bytes],
    wait: bool,
    before: PrefetchReply,
    update: Callable[[Progress], None],
) -> PrefetchReply:
    """One request; its progress is shown on top of what earlier ones did."""
    from msgspec.structs import replace

    from tierfs.control.protocol import PrefetchRequest

    def on_progress(state: Progress) -> None:
        update(
            replace(
                state,
                done_files=state.done_files + before.total_files,
                total_files=state.total_files + before.total_files,
                done_bytes=state.done_bytes + before.cached_bytes,
                total_bytes=state.total_bytes + before.total_bytes,
            )
        )

    reply: PrefetchReply = engine.call("prefetch", PrefetchRequest(paths=batch, wait=wait), on_progress)
    return reply


def _nothing() -> PrefetchReply:
    from tierfs.control.protocol import PrefetchReply

    return PrefetchReply(
        total_files=0, total_bytes=0, cached_bytes=0, failed_bytes=0, evicted_bytes=0, skipped_bytes=0
    )


def _add(total: PrefetchReply, reply: PrefetchReply) -> None:
    for name in (
        "total_files",
        "total_bytes",
        "cached_bytes",
        "failed_bytes",
        "evicted_bytes",
        "skipped_bytes",
        "failed_files",
    ):
        setattr(total, name, getattr(total, name) + getattr(reply, name))
    total.failed = [*total.failed, *reply.failed][:MAX_LISTED]
    total.started = reply.started


def _read_list(name: str, null: bool) -> list[str]:
    try:
        if name == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:
                data = file.read()
    except OSError as error:
        raise ConfigError(f"--list: cannot read {name}: {error.strerror}") from error
    lines = data.split(b"\0" if null else b"\n")
    return [os.fsdecode(line if null else line.rstrip(b"\r")) for line in lines if line.strip()]


def _on_mount(path: str) -> str:
    """Relative paths that do not lead onto a mount are meant from the root of the only one."""
    from tierfs.mountpoint import canonical, mount_of

    if os.path.isabs(path) or mount_of(canonical(path)) is not None:
        return path
    return os.path.join(target.find(None).mountpoint, path)
