"""``tierfs checkpoint commit|list|verify|restore|keep|rm``"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Annotated

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.target import JsonOption, MountArgument
from tierfs.errors import ConfigError

if TYPE_CHECKING:
    from tierfs.control.protocol import CheckpointEntry, CheckpointRestoreReply
    from tierfs.control.registry import Found

IN_STORE = "in the store"

app = typer.Typer(
    help="Checkpoints: directories of which a manifest in the bucket says when they are whole.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The directory of the checkpoint, a path on the mount.")
]


@app.command()
def commit(
    name: NameArgument,
    step: Annotated[int | None, typer.Option(help="Noted in the manifest.", min=0)] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the manifest is in the store; exit code 5 if it is not.")
    ] = False,
    timeout: Annotated[
        str | None, typer.Option(help="With --wait: give up after this time (30, 5m...).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint of the files that are in a directory now, however they were written.

    Its manifest is written when all of them are in the store. 'tierfs.checkpoint.save' does this by itself.
    """
    from tierfs.cli import output, timing
    from tierfs.control.protocol import CheckpointCommitRequest

    found = target.find(name)
    request = CheckpointCommitRequest(
        path=found.relative, step=step, wait=wait, timeout_s=timing.seconds(timeout)
    )
    with target.engine_of(found) as engine, output.progress("upload", quiet=as_json or not wait) as update:
        entry = engine.call("checkpoint-commit", request, update).checkpoint
    if as_json:
        output.show_json(entry)
    else:
        print(f"{output.printable(entry.path)}: {_state(entry)}")
    if wait and entry.state != IN_STORE:
        raise typer.Exit(exit_codes.PARTLY)


@app.command("list")
def list_(path: MountArgument = None, as_json: JsonOption = False) -> None:
    """Show every checkpoint (below PATH); exit code 5 if one is damaged."""
    from tierfs.cli import output

    entries = _entries(target.find(path))
    if as_json:
        output.show_json({"checkpoints": entries})
    else:
        output.table(
            ("checkpoint", "step", "saved", "ranks", "shards", "size", "state"),
            [
                (
                    entry.path, "-" if entry.step is None else str(entry.step), _when(entry),
                    str(entry.ranks), str(entry.shards), output.size(entry.bytes) if entry.bytes else "-",
                    _state(entry),
                )
                for entry in entries
            ],
        )  # fmt: skip
        if not entries:
            print("no checkpoints")
    if any(entry.state == "damaged" for entry in entries):
        raise typer.Exit(exit_codes.PARTLY)


@app.command()
def verify(
    name: NameArgument,
    full: Annotated[
        bool, typer.Option("--full", help="Read all bytes from the store, and compare checksums.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare what is in the store with the manifest: sizes and ETags. Exit code 5 if a shard is damaged."""
    from tierfs.cli import output
    from tierfs.control.protocol import CheckpointVerifyRequest

    found = target.find(name)
    request = CheckpointVerifyRequest(path=found.relative, full=full)
    with target.engine_of(found) as engine, output.progress("verify", quiet=as_json) as update:
        reply = engine.call("checkpoint-verify", request, update)
    if as_json:
        output.show_json(reply)
    else:
        output.list_failures(reply.damaged, reply.damaged_shards)
        whole = reply.shards - reply.damaged_shards
        read = f", {output.size(reply.checked_bytes)} read" if full else ""
        print(f"{output.printable(reply.path)}: {whole} of {reply.shards} shards are whole{read}")
    if reply.damaged_shards:
        raise typer.Exit(exit_codes.PARTLY)


@app.command()
def restore(
    name: NameArgument,
    into: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Copy it there as well, checksums checked; DIR must not exist."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until everything is local; exit code 5 if it is not.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch a checkpoint into the tiers: its manifest, then all shards in parallel. Nothing is listed.

    Without --wait it returns as soon as the shards have their names: whoever reads one gets it first.
    """
    from tierfs.cli import checkpoint_copy, output
    from tierfs.control.protocol import CheckpointRestoreRequest

    if into is not None:
        checkpoint_copy.check(into)
    found = target.find(name)
    request = CheckpointRestoreRequest(path=found.relative, wait=wait or into is not None)
    with target.engine_of(found) as engine, output.progress("restore", quiet=as_json) as update:
        reply = engine.call("checkpoint-restore", request, update)
        if into is not None and not reply.failed_shards:
            directory = target.shown(found, found.relative)
            reply.failed = checkpoint_copy.copy(directory, into, reply.sums, reply.bytes, update)
            reply.failed_shards = len(reply.failed)
    sums, reply.sums = reply.sums, {}
    _show_restored(reply, into, len(sums), as_json=as_json)
    if reply.failed_shards or (request.wait and into is None and reply.cached_bytes != reply.bytes):
        raise typer.Exit(exit_codes.PARTLY)


def _show_restored(reply: CheckpointRestoreReply, into: str | None, shards: int, *, as_json: bool) -> None:
    from tierfs.cli import output

    if as_json:
        output.show_json(reply)
        return
    name = output.printable(reply.path)
    if reply.started:
        print(f"{name}: {shards} shards, {output.size(reply.bytes)}, can be read; being fetched")
        return
    output.list_failures(reply.failed, reply.failed_shards)
    if reply.failed_shards:
        print(f"{name}: {reply.failed_shards} of {shards} shards failed")
    elif into is not None:
        print(f"{name}: {shards} shards, {output.size(reply.bytes)}, copied to {output.printable(into)}")
    elif reply.cached_bytes == reply.bytes:
        print(f"{name}: ready, {shards} shards, {output.size(reply.bytes)} local")
    else:
        print(f"{name}: {output.size(reply.cached_bytes)} of {output.size(reply.bytes)} local")
        output.say("the tiers are too small to hold all of it; the rest is read from the store")


@app.command()
def keep(
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="How many to keep.")],
    path: MountArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all but the last N whole checkpoints (below PATH) from the mount and the store.

    The last are those with the highest steps, or if any has none, the youngest. What is not in the store yet
    is neither counted nor removed, nor is a damaged one that is younger than what is kept.
    """
    from tierfs.cli import output

    found = target.find(path)
    removed, kept = to_remove(_entries(found), last)
    for entry in [] if dry_run else removed:
        _remove(found, os.fsencode(entry.path))
    if as_json:
        output.show_json({"kept": kept, "removed": removed})
        return
    for entry in removed:
        print(f"{'would remove' if dry_run else 'removed'} {output.printable(entry.path)}")
    print(f"{len(kept)} kept")


def to_remove(
    entries: list[CheckpointEntry], last: int
) -> tuple[list[CheckpointEntry], list[CheckpointEntry]]:
    """(what ``keep`` removes, oldest first; what stays)."""
    stored = [entry for entry in entries if entry.state != "local"]
    by_step = all(entry.step is not None for entry in stored)

    def age(entry: CheckpointEntry) -> tuple[int, int]:
        return ((entry.step or 0) if by_step else 0, entry.created_ns)

    stored.sort(key=age)
    whole = [entry for entry in stored if entry.state == IN_STORE]
    if len(whole) < last:
        return [], entries
    oldest_kept = age(whole[-last])
    removed = [entry for entry in stored if age(entry) < oldest_kept]
    return removed, [entry for entry in entries if entry not in removed]


@app.command("rm")
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Directories of checkpoints on the mount.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Remove checkpoints from the mount and the store, the manifest first."""
    from tierfs.cli import output

    removed = []
    for name in names:
        found = target.find(name)
        _remove(found, found.relative)
        removed.append(os.fsdecode(found.relative))
    if as_json:
        output.show_json({"removed": removed})
    else:
        for path in removed:
            print(f"removed {output.printable(path)}")


def _remove(found: Found, path: bytes) -> None:
    """Manifest first: half removed, it is no checkpoint any more."""
    from tierfs.control.protocol import CheckpointRemoveRequest

    directory = target.shown(found, path)
    with target.engine_of(found) as engine:
        reply = engine.call("checkpoint-remove", CheckpointRemoveRequest(path=path))
    if not reply.had_manifest:
        raise ConfigError(f"{directory}: is no checkpoint (there is no manifest); nothing was removed")
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{error.filename or directory}: {error.strerror}; the manifest is gone, remove the rest by hand"
        ) from error


def _entries(found: Found) -> list[CheckpointEntry]:
    from tierfs.control.protocol import CheckpointListRequest

    with target.engine_of(found) as engine:
        reply = engine.call("checkpoint-list", CheckpointListRequest(path=found.relative))
    entries: list[CheckpointEntry] = reply.checkpoints
    return entries


def _when(entry: CheckpointEntry) -> str:
    if not entry.created_ns:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created_ns / 1e9))


def _state(entry: CheckpointEntry) -> str:
    text = entry.state
    if entry.state == "local":
        text = f"local, {entry.left} of {entry.shards} shards to go"
    return f"{text}: {entry.message}" if entry.message else text
