"""``python -m benchmarks.checkpoint``: what a checkpoint costs the job, the store, and the restart.

N processes write a shard each (4 MiB writes, fsync, close) at one moment: through tierfs (native front), into
a plain directory on the disk of its write tier, and through JuiceFS without and with ``--writeback`` where it
is found. Then the same shards come back to a mount that has nothing local. All on one S3 server that this
program starts, in rounds that alternate; ratios are formed within a round. What the lines mean:

* *pulse*: from the first write to the last close, that is how long training is blocked.
* *absorb*: the same without fsync, so that memory takes it. Against *memory*, a directory in a tmpfs, and a
  plain directory. *tierfs-ram* has a RAM tier before the disk.
* *second pulse*: another one at the moment when the first has ended and is being uploaded, both within the
  dirty limit. Against a plain directory that nobody drains: on few processors server, uploads and writers
  stand in each other's way.
* *over the limit*: the same with a dirty limit of one pulse, so that writers are slowed; the rate at which
  they can write. Every write has to succeed in both.
* *save*: the same within ``tierfs.checkpoint.save``, one call per process, until it returns in all of them.
* *drain*: from the end of the pulse until all of it is in the store. tierfs does not upload before: its
  upload delay is set to an hour, and ``tierfs flush`` ends it (the start of this command is counted). Against
  *uploader*: tierfs's store client alone, parts of the same size, the better of 8 and 16 at a time.
* *commit*: after that, until the manifest is in the store (``tierfs checkpoint commit --wait``).
* *restore*: ``tierfs checkpoint restore --wait`` on a new mount with an empty tier and state directory; the
  start of the command is counted, so small checkpoints come off badly.
* *cold read*: the same, and N processes read a shard each instead. Against *raw*: plain HTTP GETs of the
  same bytes in pieces of 8 MiB by 16 processes, without any of our code.

The server's own data are in its page cache, for everybody alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tierfs.checkpoint
from benchmarks.compare.guard import Hung, WorkFailed, guarded
from benchmarks.compare.peer import MIB, Peer, PeerFailed, Site, run
from benchmarks.compare.peers import (
    PROGRAMS,
    JuiceFs,
    JuiceFsSqlite,
    JuiceFsSqliteWriteback,
    JuiceFsWriteback,
    Plain,
    Tierfs,
)
from benchmarks.compare.stage import find_binaries, stage
from benchmarks.loops import Outcome, Task, Timed, read_files, together, write_file
from benchmarks.plan import pieces
from benchmarks.pulses import (
    MEMORY,
    TIERFS,
    TIERFS_RAM,
    Draining,
    Memory,
    Waiting,
    WaitingRam,
    memory_missing,
    two_pulses,
)
from benchmarks.quick import machine
from benchmarks.samples import Metric, table
from benchmarks.servers import ServerFailed, credentials
from benchmarks.sources import S3Source, environment
from benchmarks.uploading import remove, upload

WRITE_BYTES = 4 * MIB
RAW_READERS = 16
UPLOADERS = (8, 16)
LIMIT_S = 900.0
"""For one step of one target."""
PLAIN, UPLOADER, RAW = "plain", "uploader", "raw"
GOALS = {
    "pulse": (PLAIN, 1 / 1.1),
    "absorb": (MEMORY, 0.9),
    "second pulse": (PLAIN, 1 / 1.1),
    "over the limit": (UPLOADER, 0.9),
    "save": (PLAIN, 1 / 1.1),
    "drain": (UPLOADER, 0.9),
    "restore": (RAW, 0.9),
    "cold read": (RAW, 0.9),
}
"""Line -> against whom, and how many times as good tierfs is wanted to be at least."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``ranks`` shards of ``shard_bytes`` each."""

    ranks: int
    shard_bytes: int
    rounds: int

    @property
    def total_bytes(self) -> int:
        return self.ranks * self.shard_bytes

    def shards(self, directory: Path) -> list[str]:
        return [str(directory / f"rank{rank}.pt") for rank in range(self.ranks)]


class Benchmark:
    """All lines, one round at a time."""

    def __init__(self, site: Site, scale: Scale, peers: Sequence[Peer], front: str) -> None:
        self._site = site
        self._scale = scale
        self._peers = list(peers)
        self._draining = (Draining(site, front, 0), Draining(site, front, scale.total_bytes))
        self.metrics = {
            name: Metric(name, unit, higher_is_better=unit != "s")
            for name, unit in (
                ("pulse", "s"), ("absorb", "s"), ("second pulse", "s"), ("over the limit", "MiB/s"),
                ("save", "s"), ("drain", "MiB/s"), ("commit", "s"), ("restore", "MiB/s"),
                ("cold read", "MiB/s"),
            )
        }  # fmt: skip

    def measure(self, number: int) -> None:
        """Everybody's turn, forwards in one round and backwards in the next. Raises PeerFailed and others."""
        turns: list[Callable[[], None]] = [partial(self._peer, peer) for peer in self._peers]
        turns += [self._second_pulse, self._over_the_limit, self._store]
        for turn in reversed(turns) if number % 2 else turns:
            turn()
            # Else each round leaves some ten times the bytes of a pulse, and the store is full before long.
            self._site.server.free_space()

    def _peer(self, peer: Peer) -> None:
        say(peer.name)
        os.sync()
        peer.forget()
        peer.mount()
        try:
            directory = peer.directory / "step"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            shards = self._scale.shards(directory)
            tasks = [write_file(path, self._scale.shard_bytes, WRITE_BYTES) for path in shards]
            blocked_s = self._timed(tasks, peer).seconds
            if peer.name != MEMORY:
                self.metrics["pulse"].add(peer.name, blocked_s)
            if peer.name == PLAIN:
                for name in ("save", "second pulse"):
                    self.metrics[name].add(PLAIN, blocked_s)
            if peer.mountpoint_is_store and peer.name != TIERFS_RAM:
                self._into_the_store(peer)
                self._come_back(peer, shards)
            if isinstance(peer, Waiting | Plain):
                self._absorb(peer)
            if peer.name == TIERFS:
                saved = peer.directory / "saved"
                ranks = range(self._scale.ranks)
                tasks = [save_shard(saved, rank, self._scale) for rank in ranks]
                self.metrics["save"].add(TIERFS, self._timed(tasks, peer).seconds)
                shutil.rmtree(saved)
            shutil.rmtree(directory)
            peer.drain(LIMIT_S)
            peer.unmount()
        except BaseException:
            peer.abandon()
            raise

    def _absorb(self, peer: Peer) -> None:
        """A pulse that nobody syncs, when nothing is left to be written by the kernel or to be uploaded."""
        peer.drain(LIMIT_S)
        os.sync()
        directory = peer.directory / "unsynced"
        directory.mkdir()
        tasks = [
            write_file(path, self._scale.shard_bytes, WRITE_BYTES, fsync=False)
            for path in self._scale.shards(directory)
        ]
        self.metrics["absorb"].add(peer.name, self._timed(tasks, peer).seconds)
        shutil.rmtree(directory)

    def _second_pulse(self) -> None:
        self.metrics["second pulse"].add(TIERFS, self._two_pulses(self._draining[0]))

    def _over_the_limit(self) -> None:
        self._add_rate("over the limit", TIERFS, self._two_pulses(self._draining[1]))

    def _two_pulses(self, peer: Peer) -> float:
        """Seconds of the second one."""
        say(f"{peer.name}, two pulses")
        os.sync()
        peer.forget()
        peer.mount()

        def pulse(directory: Path) -> float:
            paths = self._scale.shards(directory)
            tasks = [write_file(path, self._scale.shard_bytes, WRITE_BYTES) for path in paths]
            return self._timed(tasks, peer).seconds

        try:
            _, seconds = two_pulses(peer, pulse, lambda: peer.drain(LIMIT_S))
            peer.unmount()
        except BaseException:
            peer.abandon()
            raise
        return seconds

    def _into_the_store(self, peer: Peer) -> None:
        began = time.monotonic()
        peer.drain(LIMIT_S)
        if isinstance(peer, Tierfs):
            self._add_rate("drain", TIERFS, time.monotonic() - began)
            began = time.monotonic()
            self._checkpoint(peer, "commit", "--wait")
            self.metrics["commit"].add(TIERFS, time.monotonic() - began)

    def _come_back(self, peer: Peer, shards: Sequence[str]) -> None:
        self._start_anew(peer)
        if isinstance(peer, Tierfs):
            began = time.monotonic()
            self._checkpoint(peer, "restore", "--wait")
            self._add_rate("restore", TIERFS, time.monotonic() - began)
            self._start_anew(peer)
        tasks = [read_files([path]) for path in shards]
        self._add_rate("cold read", peer.name, self._timed(tasks, peer).seconds)

    def _start_anew(self, peer: Peer) -> None:
        peer.unmount()
        peer.forget()
        peer.mount()

    def _checkpoint(self, peer: Peer, *words: str) -> None:
        command = [sys.executable, "-m", "tierfs", "checkpoint", words[0], str(peer.directory / "step")]
        run([*command, *words[1:]], limit_s=LIMIT_S, environment=peer.environment)

    def _store(self) -> None:
        """What the store takes and gives without a file system."""
        say("the store alone")
        url = f"s3://{self._site.bucket}/alone"
        with environment(credentials(self._site.endpoint_url)):
            seconds = []
            for threads in UPLOADERS:
                uploaded = partial(upload, url, self._scale.ranks, self._scale.shard_bytes, threads)
                seconds.append(guarded(uploaded, LIMIT_S, lambda: None))
            self._add_rate("drain", UPLOADER, min(seconds))
            self._add_rate("over the limit", UPLOADER, min(seconds))
            source = S3Source(url, "")
            ranges = [
                piece
                for rank in range(self._scale.ranks)
                for piece in pieces(f"rank{rank}.pt", self._scale.shard_bytes)
            ]
            readers = min(RAW_READERS, len(ranges))
            tasks = [source.direct(ranges[first::readers]) for first in range(readers)]
            rate = self._timed(tasks, None).seconds
            self._add_rate("restore", RAW, rate)
            self._add_rate("cold read", RAW, rate)
            guarded(partial(remove, url), LIMIT_S, lambda: None)

    def _timed(self, tasks: Sequence[Task], peer: Peer | None) -> Outcome:
        found = guarded(lambda: together(tasks), LIMIT_S, peer.abandon if peer is not None else lambda: None)
        if found.amount != self._scale.total_bytes:
            raise WorkFailed(f"{found.amount} bytes were moved, not {self._scale.total_bytes}")
        return found

    def _add_rate(self, name: str, target: str, seconds: float) -> None:
        self.metrics[name].add(target, self._scale.total_bytes / MIB / seconds)


def save_shard(directory: Path, rank: int, scale: Scale) -> Task:
    """One rank's part of a save. Amount: bytes."""

    def prepare() -> Timed:
        piece = os.urandom(min(scale.shard_bytes, WRITE_BYTES))

        def timed() -> int:
            left = scale.shard_bytes
            with tierfs.checkpoint.save(directory, rank=rank, world_size=scale.ranks) as saving:
                with open(saving.shard(f"rank{rank}.pt"), "wb", buffering=0) as file:
                    while left:
                        left -= file.write(memoryview(piece)[: min(left, len(piece))])
            return scale.shard_bytes

        return timed

    return prepare


def chosen(site: Site, front: str, scale: Scale) -> tuple[list[Peer], list[str]]:
    """Who takes part, and for all others why not. JuiceFS keeps its metadata in Redis where that is here."""
    own = [Waiting(site), WaitingRam(site)]
    for peer in own:
        peer.front = front
    peers: list[Peer] = [Plain(site), *own]
    if reason := own[0].missing():
        raise PeerFailed(f"tierfs: {reason}")
    left_out = []
    if reason := memory_missing(scale.total_bytes):
        left_out.append(f"{MEMORY}: {reason}")
    else:
        peers.append(Memory(site))
    kinds = (JuiceFs, JuiceFsWriteback) if site.redis_url else (JuiceFsSqlite, JuiceFsSqliteWriteback)
    for kind in kinds:
        peer = kind(site)
        if reason := peer.missing():
            left_out.append(f"{peer.name}: {reason}")
        else:
            peers.append(peer)
    volumes = {peer.volume: peer for peer in peers if isinstance(peer, JuiceFs)}
    for peer in volumes.values():
        peer.prepare()
    return peers, left_out


def goals(metrics: dict[str, Metric]) -> list[str]:
    lines = []
    for name, (reference, wanted) in GOALS.items():
        ratio = metrics[name].ratio(TIERFS, reference)
        if ratio is not None:
            verdict = "met   " if ratio >= wanted else "MISSED"
            lines.append(f"{verdict} {name}: {ratio:.2f} x {reference}, wanted {wanted:.2f}")
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=8, help="processes, and shards (8)")
    parser.add_argument("--shard-mib", type=int, default=512, help="size of a shard (512)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="shards of 64 MiB")
    parser.add_argument("--tiny", action="store_true", help="only see whether it works")
    parser.add_argument("--front", choices=("native", "python"), default="native")
    parser.add_argument("--minio", metavar="BINARY", help="MinIO as the store instead of SeaweedFS")
    parser.add_argument(
        "--binaries", type=Path, action="append", default=[], help="a directory with programs (juicefs, weed)"
    )
    parser.add_argument("--work-dir", type=Path, help="on the disk of the tier (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    shard_bytes = (1 if options.tiny else 64 if options.quick else options.shard_mib) * MIB
    scale = Scale(2 if options.tiny else options.ranks, shard_bytes, 1 if options.tiny else options.rounds)
    about = machine()
    began = time.monotonic()
    binaries = find_binaries(options.binaries, [*PROGRAMS, "redis-server"], {})
    minio = os.path.abspath(options.minio) if options.minio else None
    work_dir = Path(tempfile.mkdtemp(prefix="tierfs-checkpoint-", dir=options.work_dir))
    try:
        with stage(work_dir, 3 * scale.total_bytes + 256 * MIB, binaries, minio) as found:
            peers, left_out = chosen(found.site, options.front, scale)
            benchmark = Benchmark(found.site, scale, peers, options.front)
            for number in range(scale.rounds):
                benchmark.measure(number)
            versions = {peer.name: peer.version() for peer in peers}
            server = found.site.server.name
            command = shlex.join(peers[1].mount_command())
    except (ServerFailed, PeerFailed, Hung, WorkFailed, OSError) as error:
        print(f"benchmarks.checkpoint: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    print(
        f"machine   {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, "
        f"Linux {about['kernel']}, Python {about['python']}, load before {about['load']:.2f}",
        f"store     {server} on loopback",
        f"mount     {command}",
        *(f"          {name}: {version}" for name, version in versions.items()),
        *(f"without   {reason}" for reason in left_out),
        f"command   {shlex.join(sys.orig_argv)}",
        f"          {scale.ranks} x {shard_bytes // MIB} MiB, {scale.rounds} rounds "
        f"in {time.monotonic() - began:.0f} s",
        "",
        table(benchmark.metrics.values(), TIERFS, [*(n for n in versions if n != TIERFS), UPLOADER, RAW]),
        "",
        f"writers    {4 * scale.ranks * scale.rounds} of second pulses, none failed",
        *goals(benchmark.metrics),
        sep="\n",
    )
    if options.json:
        content = {
            "machine": about,
            "command": shlex.join(sys.orig_argv),
            "versions": versions,
            "left_out": left_out,
            "ranks": scale.ranks,
            "shard_bytes": shard_bytes,
            "metrics": {name: metric.as_json(TIERFS) for name, metric in benchmark.metrics.items()},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


def say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
