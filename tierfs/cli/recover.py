"""``tierfs recover``"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tierfs.cli import exit_codes
from tierfs.cli.target import JsonOption

if TYPE_CHECKING:
    from tierfs.writeback.replica.record import ReplicaRecord
    from tierfs.writeback.replica.recover import Place, Recovered


def command(
    replica: Annotated[
        str,
        typer.Argument(metavar="REPLICA", help="What the lost mount had as --replica.", show_default=False),
    ],
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="What it had mounted; the files go there.", show_default=False),
    ],
    list_only: Annotated[bool, typer.Option("--list", help="Only say what the replica holds.")] = False,
    file_system: Annotated[
        str | None,
        typer.Option("--file-system", metavar="ID", help="Of one lost mount only, as --list shows it."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Files at a time.", min=1, max=64)] = 8,
    endpoint_url: Annotated[
        str | None,
        typer.Option("--endpoint-url", metavar="URL", help="Of SOURCE, for stores other than AWS."),
    ] = None,
    replica_endpoint_url: Annotated[
        str | None,
        typer.Option("--replica-endpoint-url", metavar="URL", help="Of REPLICA, if it is another."),
    ] = None,
    region: Annotated[str | None, typer.Option(metavar="NAME", help="AWS region.")] = None,
    profile: Annotated[str | None, typer.Option(metavar="NAME", help="AWS profile.")] = None,
    as_json: JsonOption = False,
) -> None:
    """After the loss of a node: bring what its replica holds into the store, from any other node."""
    from tierfs.cli import output
    from tierfs.config import load
    from tierfs.store.open import open_replica, open_store
    from tierfs.writeback.replica.recover import Place, recover

    settings = load(
        {
            "source": source, "mountpoint": "/nowhere", "replica": replica, "endpoint_url": endpoint_url,
            "replica_endpoint_url": replica_endpoint_url, "region": region, "profile": profile,
            "tier": ["none"],
        }
    )  # fmt: skip
    replica_store, replica_prefix = open_replica(settings, make=False)
    target_store, target_prefix = open_store(settings)
    try:
        held_place = Place(replica_store, replica_prefix)
        if list_only:
            _list(held_place, file_system, as_json)
            return
        target_store.check()

        def report(found: Recovered) -> None:
            output.say(f"{output.files(found.files)} ({output.size(found.bytes)}) in the store")

        found = recover(
            held_place, Place(target_store, target_prefix), settings.source,
            file_system=file_system, jobs=jobs, report=(lambda _: None) if as_json else report,
        )  # fmt: skip
    finally:
        target_store.close()
        replica_store.close()
    if as_json:
        output.show_json(found)
    else:
        _print(found)
    if found.failed:
        raise typer.Exit(exit_codes.PARTLY)


def _print(found: Recovered) -> None:
    from tierfs.cli import output

    print(f"{output.files(found.files)} ({output.size(found.bytes)}) recovered")
    if found.already_there:
        print(f"{output.files(found.already_there)} had been uploaded before")
    for key, beside in found.conflicts:
        print(f"{output.printable(key)}: another node has written it; ours is {output.printable(beside)}")
    for key, why in found.failed:
        output.say(f"{output.printable(key)}: {output.printable(why)}")


def _list(place: Place, file_system: str | None, as_json: bool) -> None:
    from tierfs.cli import output
    from tierfs.writeback.replica.recover import held_by

    held: list[ReplicaRecord] = []
    for each in held_by(place, file_system):
        if isinstance(each, tuple):
            output.say(f"{output.printable(each[0])}: {output.printable(each[1])}")
        else:
            held.append(each)
    if as_json:
        output.show_json(held)
        return
    output.table(
        ["file system", "source", "size", "key"],
        [
            [each.file_system, each.source, output.size(each.size_bytes), output.printable(each.key)]
            for each in held
        ],
    )
