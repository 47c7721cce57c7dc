"""``tierfs meta dump|load|check``"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.target import JsonOption
from tierfs.errors import ConfigError

app = typer.Typer(
    help="The namespace: what only this node knows (modes, owners, links, what waits for upload).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

StateDirOption = Annotated[
    str | None,
    typer.Option("--state-dir", metavar="DIR", help="Of a mount that is not up, instead of PATH."),
]
PathArgument = Annotated[
    str | None, typer.Argument(metavar="[PATH]", help="The mountpoint; without, the only mount there is.")
]


def _state_dir(path: str | None, state_dir: str | None) -> Path:
    if state_dir is not None:
        found = Path(state_dir)
    else:
        mount = target.find(path)
        if mount.record is None:
            raise exit_codes.NoMount(f"{mount.mountpoint}: this user has no record of it; give --state-dir")
        found = Path(mount.record.state_dir)
    if not found.is_dir():
        raise ConfigError(f"--state-dir: {found} is not a directory")
    return found


@app.command()
def dump(
    path: PathArgument = None,
    state_dir: StateDirOption = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Instead of standard output.")
    ] = None,
) -> None:
    """Write the namespace as JSON lines. The mount may be up."""
    from tierfs.cli.output import say
    from tierfs.namespace.dump import dump

    directory = _state_dir(path, state_dir)
    if output is None or output == "-":
        dump(directory, sys.stdout)
        return
    temporary = f"{output}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        count = dump(directory, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, output)
    say(f"{count} records in {output}")


@app.command()
def load(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What 'meta dump' wrote; - is standard input.")],
    state_dir: Annotated[
        str, typer.Option("--state-dir", metavar="DIR", help="Into this, which must be new.")
    ],
) -> None:
    """Make a namespace from a dump. The mount must not be up."""
    from tierfs.cli.output import say
    from tierfs.control.registry import hold_state_dir
    from tierfs.namespace.dump import load

    try:
        source = sys.stdin if file == "-" else open(file, encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigError(f"FILE: cannot read {file}: {error.strerror}") from error
    with source, hold_state_dir(Path(state_dir)):
        count = load(Path(state_dir), source)
    say(f"{count} records loaded into {state_dir}")


@app.command()
def check(path: PathArgument = None, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Look for contradictions in the namespace; exit code 1 if there are any."""
    from tierfs.cli import output
    from tierfs.namespace.dump import check

    problems = check(_state_dir(path, state_dir))
    if as_json:
        output.show_json({"problems": problems})
    else:
        for problem in problems:
            print(output.printable(problem))
        print(f"{len(problems)} problems" if problems else "no problems")
    if problems:
        raise typer.Exit(exit_codes.FAILED)
