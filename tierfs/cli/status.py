"""``tierfs status``"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierfs.cli import target
from tierfs.cli.target import JsonOption, MountArgument

if TYPE_CHECKING:
    from tierfs.control.protocol import FrontStatus, ReplicaStatus, Stages, StatusReply


def command(path: MountArgument = None, as_json: JsonOption = False) -> None:
    """Tiers, hit rates, backlog and state of a mount."""
    from tierfs.cli.output import show_json

    with target.engine_of(target.find(path), timeout_s=target.ANSWER_TIMEOUT_S) as engine:
        reply = engine.call("status")
    if as_json:
        show_json(reply)
    else:
        _print(reply)


def _front_counts(front: FrontStatus) -> str:
    if front.passthrough_errno:
        passthrough = f"no passthrough ({os.strerror(front.passthrough_errno)})"
    else:
        passthrough = f"{front.passthrough_opens} opens passed through"
    if front.no_open:
        passthrough += "; files are opened without asking"
    restarts = max(front.engine_starts - 1, 0)
    return (
        f"pid {front.pid}, engine restarted {restarts} {'time' if restarts == 1 else 'times'}; "
        f"{front.answered} requests answered, {front.relayed} handed to the engine, {passthrough}"
    )


def _print_stages(stages: Stages) -> None:
    from tierfs.cli.output import files, size

    if stages.memory.files or stages.disk.files:
        print(
            f"  stages   {size(stages.memory.bytes)} only in memory ({files(stages.memory.files)}), "
            f"{size(stages.disk.bytes)} on the disk ({files(stages.disk.files)}); "
            f"{files(stages.uploading.files)} ({size(stages.uploading.bytes)}) being uploaded"
        )


def _print_replica(replica: ReplicaStatus) -> None:
    from tierfs.cli.output import files, printable, size

    print(
        f"  replica  {replica.state}, {files(replica.held_files)} ({size(replica.held_bytes)}) held, "
        f"{files(replica.waiting_files)} ({size(replica.waiting_bytes)}) only on this node; "
        f"{printable(replica.url)}"
    )
    if replica.why:
        print(f"           {printable(replica.why)}")


def _print(reply: StatusReply) -> None:
    from tierfs.cli.output import duration, files, printable, size, table

    access = "read-only" if reply.read_only else "read-write"
    print(f"{printable(reply.source)} on {printable(reply.mountpoint)} ({access})")
    print(
        f"  engine   pid {reply.engine.pid}, tierfs {reply.version}, up {duration(reply.uptime_s)}, "
        f"memory {size(reply.engine.rss_bytes)}"
    )
    print(f"  front    {reply.front.kind} ({reply.front.why})")
    if reply.front.kind == "native":
        print(f"           {_front_counts(reply.front)}")
        print(f"           requests through {reply.front.transport} ({reply.front.transport_why})")
    print(f"  state    {printable(reply.state_dir)}")
    requests = sum(reply.store.requests.values())
    print(
        f"  store    {reply.store.state}, {requests} requests, {reply.store.errors} errors, "
        f"{size(reply.store.bytes_read)} read, {size(reply.store.bytes_written)} written"
    )
    print(
        f"  open     {files(reply.open_handles)}, {reply.open_directories} directories; "
        f"{reply.inodes} known entries, {reply.hidden_keys} hidden keys"
    )
    backlog = reply.backlog
    if backlog.files or backlog.deletes:
        uploads = f"{files(backlog.files)} ({size(backlog.bytes)}) to upload"
        print(
            f"  backlog  {uploads}, {backlog.deletes} to delete, the oldest for {duration(backlog.oldest_s)}"
        )
    else:
        print("  backlog  nothing: all is in the store")
    if reply.stages is not None:
        _print_stages(reply.stages)
    if reply.replica is not None:
        _print_replica(reply.replica)
    if backlog.conflicts:
        moved = f"{files(backlog.conflicts)} moved aside: another node had written the same object"
        print(f"  conflict {moved} ('*.conflict-*', see the log)")
    if backlog.copied_bytes:
        print(
            f"  sent     {size(backlog.sent_bytes)} of files, and "
            f"{size(backlog.copied_bytes)} copied in the store, which had them already"
        )
    for failure in backlog.failed:
        print(f"  failed   {printable(failure.path)}: {printable(failure.message)}")
    print()
    table(
        ["tier", "files", "used", "capacity", "dirty", "pinned", "hit rate", "state", "path"],
        [
            [
                tier.name,
                str(tier.files),
                size(tier.used_bytes),
                size(tier.capacity_bytes),
                size(tier.dirty_bytes),
                size(tier.pinned_bytes),
                f"{100 * tier.hits / (tier.hits + tier.misses):.1f} %" if tier.hits + tier.misses else "-",
                tier.state,
                tier.path,
            ]
            for tier in reply.tiers
        ],
    )
