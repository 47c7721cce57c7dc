"""``tierfs doctor``"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tierfs.cli import exit_codes
from tierfs.cli.target import JsonOption


def command(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[SOURCE]", help="Also check access to s3://bucket or a directory."),
    ] = None,
    state_dir: Annotated[str | None, typer.Option(help="Where state would go.", metavar="DIR")] = None,
    endpoint_url: Annotated[
        str | None, typer.Option(help="For stores other than AWS.", metavar="URL")
    ] = None,
    region: Annotated[str | None, typer.Option(help="AWS region.")] = None,
    profile: Annotated[str | None, typer.Option(help="AWS profile with the credentials.")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file of a mount.", metavar="FILE")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check FUSE, kernel, permissions, credentials, bucket, clock and disk, and say what to do.

    Exit code 1 if something stands in the way of a mount.
    """
    from tierfs.cli import checks, output

    given = {
        "source": source,
        "state_dir": state_dir,
        "endpoint_url": endpoint_url,
        "region": region,
        "profile": profile,
    }
    results = []
    for result in checks.run({name: value for name, value in given.items() if value is not None}, config):
        results.append(result)
        if not as_json:
            _print(result)
    blocking = [result.name for result in results if result.level == "blocks"]
    if as_json:
        checked = [
            {"name": result.name, "level": result.level, "found": result.found, "advice": result.advice}
            for result in results
        ]
        output.show_json({"can_mount": not blocking, "checks": checked})
    elif blocking:
        output.say(f"a mount is not possible yet: {', '.join(blocking)}")
    else:
        print("a mount is possible")
    if blocking:
        raise typer.Exit(exit_codes.FAILED)


def _print(result: object) -> None:
    from tierfs.cli.checks import Result

    assert isinstance(result, Result)
    colours = {"ok": "32", "note": "36", "warns": "33", "blocks": "31"}
    mark = f"{result.level:6}"
    if sys.stdout.isatty():
        mark = f"\x1b[{colours[result.level]}m{mark}\x1b[0m"
    print(f"{mark}  {result.name:12}  {result.found}")
    if result.advice:
        print(f"{'':22}-> {result.advice}")
