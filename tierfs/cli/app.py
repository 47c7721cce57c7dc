"""The typer application: which command is called what."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
import typer.main
from typer.core import TyperGroup

from tierfs import __version__
from tierfs.cli import (
    bench,
    checkpoint,
    doctor,
    evict,
    exit_codes,
    flush,
    import_,
    meta,
    mount,
    pin,
    plan,
    prefetch,
    recover,
    snapshot,
    status,
    umount,
    unpin,
    upgrade,
    version,
)
from tierfs.errors import TierfsError

app = typer.Typer(
    name="tierfs",
    help="An S3 bucket as a POSIX directory, with what the job needs in local RAM and NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tierfs {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("mount")(mount.command)
app.command("umount")(umount.command)
app.command("status")(status.command)
app.command("flush")(flush.command)
app.command("import")(import_.command)
app.command("prefetch")(prefetch.command)
app.command("pin")(pin.command)
app.command("unpin")(unpin.command)
app.command("evict")(evict.command)
app.command("recover")(recover.command)
app.command("upgrade")(upgrade.command)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(meta.app, name="meta")
app.command("bench")(bench.command)
app.command("plan")(plan.command)
app.command("doctor")(doctor.command)
app.command("version")(version.command)


def run(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    group = typer.main.get_command(app)
    if isinstance(group, TyperGroup):
        group.rich_markup_mode = None  # the list of commands without rich: half the time
    try:
        group.main(args=arguments, prog_name="tierfs")
    except SystemExit as exit_:
        if exit_.code is None:
            return exit_codes.OK
        return exit_.code if isinstance(exit_.code, int) else exit_codes.FAILED
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except TierfsError as error:
        print(f"tierfs: {error}", file=sys.stderr)
        return exit_codes.code_of(error)
    return exit_codes.OK
