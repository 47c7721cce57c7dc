"""``tierfs meta dump|load|check|backlog|drain``"""

from __future__ import annotations

import os
import sys
from functools import partial
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


WhereArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[STATE_DIR|SOURCE|PATH]",
        help="A state directory, the source of an earlier mount, or a mountpoint; the only mount there is.",
    ),
]


@app.command()
def backlog(where: WhereArgument = None, as_json: JsonOption = False) -> None:
    """What is not in the store yet, also of a file system that is not mounted."""
    import time

    from tierfs.cache.dirty import staged_bytes
    from tierfs.cli import output, remembered
    from tierfs.errors import MountError
    from tierfs.namespace.backlog import backlog_of

    state_dir = _state_dir_of(where)
    try:
        tiers = [tier.path for tier in remembered.read(state_dir).tiers if tier.path is not None]
    except MountError:
        tiers = []  # never mounted, or by another version: what the namespace says has to do
    found = backlog_of(state_dir, partial(staged_bytes, tiers))
    if as_json:
        output.show_json(found)
        return
    now_ns = time.time_ns()

    def waits(since_ns: int) -> str:
        return output.duration(max(0, now_ns - since_ns) / 1e9)

    output.table(
        ["waits", "size", "why", "path"],
        [
            [waits(one.since_ns), output.size(one.bytes), ", ".join(one.reasons), one.path]
            for one in found.uploads
        ],
    )
    if found.uploads and found.deletes:
        print()
    output.table(
        ["waits", "to be deleted"],
        [[waits(one.since_ns), one.key + ("*" if one.is_prefix else "")] for one in found.deletes],
    )
    what = f"{output.files(len(found.uploads))} ({output.size(found.upload_bytes)}) to upload"
    output.say(f"{what}, {len(found.deletes)} to delete in {output.printable(found.source)}")


@app.command()
def drain(
    where: WhereArgument = None,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after this time (30, 5m...); exit code 5.", metavar="TIME")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Upload what an earlier mount left, without mounting. Of a mount that is up, 'tierfs flush' does it.

    With the settings of the last mount; credentials come from the environment, as for 'tierfs mount'.
    Exit codes: 0 all is in the store; 5 something is left, and kept.
    """
    from tierfs.cli import output, remembered, timing
    from tierfs.control.protocol import Progress
    from tierfs.mount.drain import drain as drain_

    settings = remembered.read(_state_dir_of(where))
    timeout_s = timing.seconds(timeout)
    with output.progress("upload", quiet=as_json) as update:

        def on_progress(files: int, size_bytes: int, left: int, left_bytes: int) -> None:
            update(
                Progress(
                    phase="upload",
                    done_files=max(0, files - left),
                    total_files=files,
                    done_bytes=max(0, size_bytes - left_bytes),
                    total_bytes=size_bytes,
                )
            )

        result = drain_(settings, timeout_s=timeout_s, on_progress=on_progress)
    if as_json:
        output.show_json(result)
    else:
        done = result.files - result.remaining_files
        print(f"{output.files(done)} ({output.size(result.bytes - result.remaining_bytes)}) uploaded")
        for failure in result.failures:
            output.say(f"{output.printable(failure.path)}: {failure.message}")
        if result.remaining_files or result.remaining_deletes:
            output.say(
                f"left: {output.files(result.remaining_files)} ({output.size(result.remaining_bytes)}) "
                f"to upload, {result.remaining_deletes} to delete; kept in {settings.state_dir}"
            )
    if result.remaining_files or result.remaining_deletes:
        raise typer.Exit(exit_codes.PARTLY)


def _state_dir_of(where: str | None) -> Path:
    """The state directory that ``where`` means. Raises ``ConfigError`` or ``NoMount``."""
    if where is None:
        return _state_dir(None, None)
    if (Path(where) / "namespace.lmdb").is_dir():
        return Path(where)
    known = _state_dirs_for(where)
    if len(known) == 1:
        return known[0]
    if known:
        raise ConfigError(f"{where}: was mounted at several places; name one: " + ", ".join(map(str, known)))
    if where.startswith("s3://"):
        raise ConfigError(f"{where}: no state directory of it is known; name the directory")
    return _state_dir(where, None)


def _state_dirs_for(source: str) -> list[Path]:
    """Those at the usual place that belong to ``source``, and those of mounts that are up."""
    from tierfs.config import values
    from tierfs.config.load import default_base_dir
    from tierfs.control import registry
    from tierfs.errors import TierfsError
    from tierfs.namespace.backlog import source_of

    try:
        wanted = str(values.source(source))
    except (ConfigError, ValueError):
        return []
    candidates = {path.parent for path in Path(default_base_dir(os.environ)).glob("*/namespace.lmdb")}
    candidates |= {Path(record.state_dir) for record in registry.records()}
    found = []
    for directory in sorted(candidates):
        try:
            if source_of(directory) == wanted:
                found.append(directory)
        except TierfsError:
            continue  # of another version, or damaged: not what was asked for
    return found
