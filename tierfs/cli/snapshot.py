"""``tierfs snapshot create|list|delete|diff|restore|clone``"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.target import JsonOption, MountArgument

if TYPE_CHECKING:
    from tierfs.control.protocol import MissingFile, SnapshotInfo

app = typer.Typer(
    help="A directory as it was: made in constant time, read under .tierfs/snapshots/ of the mount.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

NameOption = Annotated[str, typer.Option("--name", help="What the snapshot is called.")]


@app.command()
def create(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The mountpoint or a directory inside it.")],
    name: NameOption,
    flush: Annotated[
        bool,
        typer.Option(
            help="First wait until everything below DIR is in the store. Without, a file of which that is "
            "not true is in the snapshot as the store had it."
        ),
    ] = True,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="First list what is in the bucket and was never listed; else such a directory cannot be "
            "opened in the snapshot.",
        ),
    ] = False,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after this time (30, 5m...), with no snapshot made.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Keep DIR as it is now."""
    from tierfs.cli import output, timing
    from tierfs.control.protocol import SnapshotCreateRequest

    found = target.find(directory)
    request = SnapshotCreateRequest(
        path=found.relative,
        name=os.fsencode(name),
        flush=flush,
        complete=complete,
        timeout_s=timing.seconds(timeout),
    )
    with target.engine_of(found) as engine, output.progress("upload", quiet=as_json) as update:
        reply = engine.call("snapshot-create", request, update)
    if as_json:
        output.show_json(reply)
        return
    print(reply.snapshot.location)
    if reply.not_in_store:
        output.say(
            f"{output.files(reply.not_in_store)} not in the store at that moment: of these the snapshot has "
            "what the store had"
        )


@app.command("list")
def list_all(path: MountArgument = None, as_json: JsonOption = False) -> None:
    """Every snapshot of a mount."""
    from tierfs.cli import output
    from tierfs.control.protocol import SnapshotListRequest

    found = target.find(path)
    with target.engine_of(found, timeout_s=target.ANSWER_TIMEOUT_S) as engine:
        reply = engine.call("snapshot-list", SnapshotListRequest())
    if as_json:
        output.show_json(reply)
        return
    for snapshot in reply.snapshots:
        print(_line(snapshot))
    for job in reply.jobs:
        output.say(f"a {job.kind} to /{output.printable(job.path)} is under way")


@app.command()
def delete(path: MountArgument, name: NameOption, as_json: JsonOption = False) -> None:
    """Delete a snapshot of the mount at PATH; the space that only it needs is freed in the background."""
    from tierfs.cli import output
    from tierfs.control.protocol import SnapshotDeleteRequest

    found = target.find(path)
    with target.engine_of(found, timeout_s=target.ANSWER_TIMEOUT_S) as engine:
        reply = engine.call("snapshot-delete", SnapshotDeleteRequest(name=os.fsencode(name)))
    if as_json:
        output.show_json(reply)


@app.command()
def diff(
    path: MountArgument,
    name: NameOption,
    other: Annotated[
        str | None, typer.Option("--to", metavar="NAME", help="Another snapshot; without, what is there now.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Lines to print; the counts are complete.")] = 10_000,
    as_json: JsonOption = False,
) -> None:
    """What was added, removed and changed since a snapshot was made."""
    from tierfs.cli import output
    from tierfs.control.protocol import SnapshotDiffRequest

    found = target.find(path)
    request = SnapshotDiffRequest(
        name=os.fsencode(name), other=os.fsencode(other) if other is not None else None, limit=limit
    )
    with target.engine_of(found) as engine:
        reply = engine.call("snapshot-diff", request)
    if as_json:
        output.show_json(reply)
        return
    signs = {"added": "+", "removed": "-", "changed": "~"}
    for entry in reply.differences:
        print(f"{signs[entry.change]} {entry.path}" + (f" ({entry.what})" if entry.what else ""))
    output.say(f"{reply.added} added, {reply.removed} removed, {reply.changed} changed")


ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Also although entries of the snapshot cannot be had any more (they are left as they are), or "
        "files that may be replaced are open for writing.",
    ),
]


@app.command()
def restore(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The mountpoint or a directory inside it.")],
    name: NameOption,
    backup: Annotated[
        bool,
        typer.Option(
            help="First make a snapshot before-restore-... of DIR as it is now, if anything differs."
        ),
    ] = True,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make DIR what it was when the snapshot was made: of its directory, or of one inside it.

    Names and attributes change; no file data pass through this node. What is the same stays as it is. The
    objects follow on the server, in the background, as after any change ('tierfs flush' waits).
    """
    from tierfs.cli import output
    from tierfs.control.protocol import SnapshotRestoreRequest

    found = target.find(directory)
    request = SnapshotRestoreRequest(path=found.relative, name=os.fsencode(name), backup=backup, force=force)
    with _going_on("restore"), target.engine_of(found) as engine:
        with output.progress("restore", quiet=as_json) as update:
            reply = engine.call("snapshot-restore", request, update)
    if as_json:
        output.show_json(reply)
    else:
        if reply.backup:
            output.say(f"what was there before is the snapshot {reply.backup}")
        output.say(
            f"{reply.made} added, {reply.replaced} replaced, {reply.removed} removed, "
            f"{reply.changed} changed in mode, owner or time"
        )
        _name_missing(reply.missing, reply.missing_count)
    if reply.missing_count:
        raise typer.Exit(exit_codes.PARTLY)


@app.command()
def clone(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The snapshot, or a directory in it: NAME/some/where.")
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="A path on the same mount that does not exist yet.")
    ],
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a writable copy of a snapshot at DEST, which appears when it is complete.

    No file data pass through this node: what is in the copy is read from where the snapshot has it, and gets
    objects of its own by copies on the server, in the background ('tierfs flush' waits).
    """
    from tierfs.cli import output
    from tierfs.control.protocol import SnapshotCloneRequest

    found = target.find(destination)
    snapshot, _, below = os.fsencode(name).partition(b"/")
    request = SnapshotCloneRequest(name=snapshot, below=below, path=found.relative, force=force)
    with _going_on("clone"), target.engine_of(found) as engine:
        with output.progress("clone", quiet=as_json) as update:
            reply = engine.call("snapshot-clone", request, update)
    if as_json:
        output.show_json(reply)
    else:
        output.say(f"{reply.entries} entries")
        _name_missing(reply.missing, reply.missing_count)
    if reply.missing_count:
        raise typer.Exit(exit_codes.PARTLY)


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    from tierfs.cli import output

    try:
        yield
    except KeyboardInterrupt:
        output.say(f"a {what} that has begun goes on in the background; the same command waits for it")
        raise


def _name_missing(missing: list[MissingFile], count: int) -> None:
    from tierfs.cli import output

    for entry in missing:
        output.say(f"{output.printable(entry.path)}: {entry.reason}")
    if count > len(missing):
        output.say(f"... and {count - len(missing)} more")


def _line(snapshot: SnapshotInfo) -> str:
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(snapshot.created_ns / 1e9))
    return f"{snapshot.name}  {made}  /{snapshot.path}  {snapshot.location}"
