"""``tierfs plan``"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierfs.errors import ConfigError

if TYPE_CHECKING:
    from tierfs.plan.scenario import Scenario

_JOB, _NODE = "The job", "A node"
_STORE, _NFS = "The store (rates: for all nodes together)", "NFS, for comparison"


def _option(panel: str, words: str, metavar: str = "") -> Any:
    """In brackets at the end of ``words``: what is assumed without it."""
    return typer.Option(help=words, metavar=metavar or None, rich_help_panel=panel, show_default=False)


Text = str | None
Whole = int | None


def command(
    gpus: Annotated[Whole, _option(_JOB, "GPUs of the whole job (8).")] = None,
    gpus_per_node: Annotated[Whole, _option(_JOB, "GPUs of one node (8).")] = None,
    nodes: Annotated[Whole, _option(_JOB, "Nodes; instead of --gpus-per-node.")] = None,
    dataset: Annotated[Text, _option(_JOB, "Size of the data set (1T).", "SIZE")] = None,
    sample_size: Annotated[Text, _option(_JOB, "Mean size of a sample (128K).", "SIZE")] = None,
    samples_per_s: Annotated[
        float | None, _option(_JOB, "Samples that one GPU consumes per second (50).")
    ] = None,
    step_time: Annotated[Text, _option(_JOB, "Of a step when nobody waits for data (1s).", "TIME")] = None,
    batch_size: Annotated[
        Whole, _option(_JOB, "Samples per GPU and step; with --step-time, instead of --samples-per-s.")
    ] = None,
    layout: Annotated[Text, _option(_JOB, "shards; or files, one per sample (shards).")] = None,
    shard_size: Annotated[Text, _option(_JOB, "Size of a shard (256M).", "SIZE")] = None,
    order: Annotated[
        Text, _option(_JOB, "shuffled; or sequential, the same in every epoch (shuffled).")
    ] = None,
    partition: Annotated[
        Text,
        _option(_JOB, "shuffled: dealt to the nodes anew each epoch; fixed: each keeps its part (shuffled)."),
    ] = None,
    epochs: Annotated[Whole, _option(_JOB, "How often all of it is read (3).")] = None,
    workers: Annotated[Whole, _option(_JOB, "Loader processes per GPU (4).")] = None,
    prefetch_batches: Annotated[Whole, _option(_JOB, "Batches that each of them may be ahead (2).")] = None,
    checkpoint: Annotated[
        Text, _option(_JOB, "Size of a checkpoint, all ranks together; without, none is saved.", "SIZE")
    ] = None,
    parameters: Annotated[
        Text,
        _option(_JOB, "Parameters of the model, as 7B; with --optimizer, instead of --checkpoint.", "NUMBER"),
    ] = None,
    optimizer: Annotated[
        Text,
        _option(_JOB, "Saved per parameter: none 2 bytes (16-bit weights alone), sgd 10, adam 14 (adam)."),
    ] = None,
    save_interval: Annotated[Text, _option(_JOB, "Training between two saves (1h).", "TIME")] = None,
    ram: Annotated[
        Text, _option(_NODE, "RAM for data: a tier, or page cache for NFS; 0 for none (64G).", "SIZE")
    ] = None,
    nvme: Annotated[Text, _option(_NODE, "NVMe for data and checkpoints (2T).", "SIZE")] = None,
    ram_rate: Annotated[Text, _option(_NODE, "Reads from RAM (10G).", "RATE")] = None,
    nvme_read_rate: Annotated[Text, _option(_NODE, "Reads from NVMe (5G).", "RATE")] = None,
    nvme_write_rate: Annotated[
        Text, _option(_NODE, "Writes to NVMe, until they are safe (2G).", "RATE")
    ] = None,
    network: Annotated[
        Text, _option(_NODE, "In each direction; bits as well, 100Gbit (10G).", "RATE")
    ] = None,
    mount_rate: Annotated[
        Text,
        _option(_NODE, "What one mount fetches from a store without limits; without, as measured.", "RATE"),
    ] = None,
    mount_write_rate: Annotated[
        Text, _option(_NODE, "What one mount writes to a disk without limits; without, as measured.", "RATE")
    ] = None,
    mount_latency: Annotated[
        Text, _option(_NODE, "What it adds to each request to the store; without, as measured.", "TIME")
    ] = None,
    local_latency: Annotated[Text, _option(_NODE, "Of a read of what is local (0.1ms).", "TIME")] = None,
    read_ahead: Annotated[Text, _option(_NODE, "As for mount (64M).", "SIZE")] = None,
    fetch_concurrency: Annotated[Whole, _option(_NODE, "As for mount (32).")] = None,
    upload_concurrency: Annotated[Whole, _option(_NODE, "As for mount (8).")] = None,
    upload_delay: Annotated[Text, _option(_NODE, "As for mount (1s).", "TIME")] = None,
    store_read_rate: Annotated[Text, _option(_STORE, "Reads (20G).", "RATE")] = None,
    store_write_rate: Annotated[Text, _option(_STORE, "Writes (10G).", "RATE")] = None,
    store_stream_rate: Annotated[Text, _option(_STORE, "Of one connection (80M).", "RATE")] = None,
    store_latency: Annotated[Text, _option(_STORE, "To the first byte, median (30ms).", "TIME")] = None,
    store_latency_p99: Annotated[Text, _option(_STORE, "99th percentile (120ms).", "TIME")] = None,
    nfs_read_rate: Annotated[Text, _option(_NFS, "Of the server (4G).", "RATE")] = None,
    nfs_write_rate: Annotated[Text, _option(_NFS, "Of the server (2G).", "RATE")] = None,
    nfs_stream_rate: Annotated[Text, _option(_NFS, "Of one client (1G).", "RATE")] = None,
    nfs_latency: Annotated[Text, _option(_NFS, "Of a request (1ms).", "TIME")] = None,
    nfs_read_ahead: Annotated[Text, _option(_NFS, "Of the client (16M).", "SIZE")] = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(
            help="Rates and latencies from what 'tierfs bench --json' wrote. Repeatable.", metavar="FILE"
        ),
    ] = None,
    goal: Annotated[float, typer.Option(help="Wanted part of the time that GPUs compute.")] = 0.95,
    seed: Annotated[
        Whole, typer.Option(help="The same seed gives the same answer (1).", show_default=False)
    ] = None,
    no_curve: Annotated[
        bool, typer.Option("--no-curve", help="Leave out the run from 8 to 1,024 GPUs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Text, typer.Option(help="Write a page with plots.", metavar="FILE", show_default=False)
    ] = None,
) -> None:
    """Will it be enough? A training job, simulated on NFS, on an object store, and on tierfs."""
    given = {name: value for name, value in locals().items() if value is not None}
    from tierfs.cli.output import show_json
    from tierfs.plan.answer import answer
    from tierfs.plan.describe import report
    from tierfs.report import print_text, write_html

    scenario, sources = scenario_of(given)
    if not 0 < goal <= 1:
        raise ConfigError(f"--goal: {goal:g} is not a part of 1; write for example 0.95")
    if html is not None:
        _check_page(html)
    with _told() as told:
        found = answer(scenario, sources=sources, goal=goal, with_curve=not no_curve, told=told)
    described = report(found, command=shlex.join(["tierfs", *sys.argv[1:]]))
    if html is not None:
        write_html(described, html)
    if as_json:
        show_json(found)
    else:
        print_text(described)


def scenario_of(given: dict[str, Any]) -> tuple[Scenario, dict[str, str]]:
    """What is simulated, from options by the names of the parameters of ``command``; and whence each value
    is.

    Raises ``ConfigError`` that names the option.
    """
    from tierfs.cli.plan_values import typed
    from tierfs.plan.measured import load_check
    from tierfs.plan.rates import read_reports
    from tierfs.plan.scenario import Scenario

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    check = load_check()
    if check is not None:
        values |= check.per_core
        sources |= dict.fromkeys(values, f"measured on {check.date}: one core's worth ({check.processor})")
    for found, source in ((read_reports(given.get("bench", [])), "bench report"), (typed(given), "given")):
        values |= found
        sources |= dict.fromkeys(found, source)
    return Scenario(**values).check(), sources


def _check_page(path: str) -> None:
    """Before the simulation, not after it."""
    from tierfs.report import why_no_plots

    why = why_no_plots()
    if why is None and not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        why = f"{path} cannot be written: no such directory, or no right to"
    if why is not None:
        raise ConfigError(f"--html: {why}")


@contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """What is being simulated, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("simulating") as status:
        yield lambda words: status.update(f"simulating: {words}")
