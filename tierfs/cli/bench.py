"""``tierfs bench``"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tierfs.cli import exit_codes

if TYPE_CHECKING:
    from tierfs.bench.result import BenchResult
    from tierfs.bench.target import BenchTarget


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A directory, a mountpoint, or s3://bucket[/prefix] or file:///dir directly.",
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Less than 60 s and 1 GiB.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result; - is standard output.")
    ] = None,
    html_file: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write a report with plots.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these loads, separated by commas; ? lists them.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Data written at most (512M, 8G...); default 4G, 512M with --quick.")
    ] = None,
    seconds: Annotated[
        str | None, typer.Option("--time", help="Stop measuring after this time (90, 5m...).")
    ] = None,
    each: Annotated[
        str | None, typer.Option(help="How long one loop runs (0.5, 10s...); default 5s, 1.2s with --quick.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes at most; default twice the cores, between 4 and 16.")
    ] = None,
    directory: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Work below this directory (prefix) of TARGET.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one: other data, another order.")] = 0,
    endpoint_url: Annotated[
        str | None, typer.Option(help="For stores other than AWS.", metavar="URL")
    ] = None,
    region: Annotated[str | None, typer.Option(help="AWS region.")] = None,
    profile: Annotated[str | None, typer.Option(help="AWS profile with the credentials.")] = None,
) -> None:
    """Measure a directory, a mount or a bucket with the loads of a training job.

    Works in a directory (prefix) of its own, and removes what it made. Exit code 5 if a load failed.
    """
    from tierfs.bench import result as results
    from tierfs.bench import run, scale, workloads
    from tierfs.bench.report import report_of
    from tierfs.cli import output, timing
    from tierfs.errors import ConfigError
    from tierfs.report import print_text, why_no_plots, write_html

    if only == "?":
        output.table(["load", "what it does"], [[load.name, load.what] for load in workloads.ALL])
        return
    loads = workloads.chosen([name.strip() for name in (only or "").split(",") if name.strip()])
    missing = why_no_plots()
    if html_file is not None and missing:
        raise ConfigError(f"--html: {missing}")
    wanted = scale.choose(
        quick=quick,
        size_bytes=_size(size),
        limit_s=timing.seconds(seconds, "--time"),
        each_s=timing.seconds(each, "--each"),
        workers=workers,
    )
    store_options = {"endpoint_url": endpoint_url, "region": region, "profile": profile}
    measured = _open(target, directory, {name: value for name, value in store_options.items() if value})
    with _interruptible(), _progress(quiet=json_file == "-") as watcher:
        result = run.run(
            measured,
            wanted,
            loads,
            seed=seed,
            watcher=watcher,
            options={
                "quick": quick,
                "size_bytes": wanted.size_bytes,
                "limit_s": wanted.limit_s,
                "each_s": wanted.variant_s,
                "seed": seed,
            },
        )
    if json_file == "-":
        sys.stdout.buffer.write(results.encode(result))
    else:
        print_text(report_of(result, plots=False))
        if json_file is not None:
            results.write_result(result, json_file)
    if html_file is not None:
        write_html(report_of(result), html_file)
        output.say(f"report: {html_file}")
    _end(result)


def _end(result: BenchResult) -> None:
    if not result.measurements:
        raise typer.Exit(exit_codes.FAILED)
    if any(skipped.failed for skipped in result.skipped):
        raise typer.Exit(exit_codes.PARTLY)


def _size(text: str | None) -> int | None:
    from tierfs.config import values
    from tierfs.errors import ConfigError

    if text is None:
        return None
    try:
        return values.size_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--size: {error}") from None


def _open(target: str, directory: str | None, options: dict[str, str]) -> BenchTarget:
    from tierfs.bench.bucket import BucketTarget
    from tierfs.bench.directory import DirectoryTarget
    from tierfs.config import load
    from tierfs.errors import ConfigError

    if "://" in target:
        source = f"{target.rstrip('/')}/{directory.strip('/')}" if directory else target
        # Nothing is mounted and no state is kept: settings ask for both, the store for neither.
        unused = {"mountpoint": "/nonexistent/tierfs", "state_dir": "/nonexistent/tierfs-state"}
        return BucketTarget(load({"source": source, **unused, **options}))
    if options:
        raise ConfigError(
            f"--{next(iter(options)).replace('_', '-')} is for a store: name s3://bucket[/prefix]"
        )
    return DirectoryTarget(os.path.join(target, directory.lstrip("/")) if directory else target)


@contextmanager
def _interruptible() -> Iterator[None]:
    """A terminal that closes, or somebody who ends the process: clean up as after Ctrl-C."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, elsewhere a line when something else is being done."""
    if sys.stderr.isatty():
        with _bar() as update:
            yield update
    elif quiet:
        yield lambda what, share: None
    else:
        yield _Lines().update


class _Lines:
    INTERVAL_S = 2.0

    def __init__(self) -> None:
        self._last = ""
        self._next_s = 0.0

    def update(self, what: str, share: float) -> None:
        from tierfs.cli.output import say

        if what != self._last and time.monotonic() >= self._next_s:
            self._last = what
            self._next_s = time.monotonic() + self.INTERVAL_S
            say(f"{share:4.0%}  {what}")


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    ]
    # No thread that refreshes: processes are forked meanwhile.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=1.0)
        next_s = 0.0

        def update(what: str, share: float) -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + 0.1
                bar.update(task, completed=share, description=what, refresh=True)

        yield update
