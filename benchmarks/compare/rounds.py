"""The order of a run: blocks of steps, every peer in turn, forwards and backwards, round after round.

All peers of a network are mounted at the same time; those whose turn it is not are idle. In round 1 the
first block is done by A, B, C, in round 2 by C, B, A, and so on, so that what is slowly changing on the
machine always hits another one. A round is begun only if the last one would fit into the time that is left;
after the deadline nothing is measured any more, and what was measured is reported.

A peer that fails a step is noted and goes on with its next step; one that cannot be mounted, unmounted or
emptied, or that hangs, is out for the rest of this network.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare import processes
from benchmarks.compare.guard import Hung, WorkFailed, guarded
from benchmarks.compare.measures import BLOCKS, FAR_BLOCKS, MOUNT, STORED, Done, Scale, Step, own_place
from benchmarks.compare.peer import Peer, PeerFailed
from benchmarks.compare.result import CompareResult, Failure, Network, Value

HANG_MARGIN_S = 10.0
CHECKPOINT_LIMIT_S = 60.0
DRAIN_LIMIT_S = 60.0
LISTING_POLL_S = 0.05

Stored = Callable[[str], int]
"""Bytes of all objects below a key."""


def in_turn(count: int, number: int) -> list[int]:
    """The order of a round: forwards in round 0, backwards in round 1, forwards again..."""
    order = list(range(count))
    return order if number % 2 == 0 else order[::-1]


def fits(rounds_s: Sequence[float], left_s: float) -> bool:
    """Whether another round may be begun: the longest so far would end in time. The first one always may."""
    return not rounds_s or max(rounds_s) < left_s


@dataclass(slots=True)
class Conductor:
    """Runs the steps of one network. ``marks``: of the servers, by role."""

    result: CompareResult
    network: Network
    scale: Scale
    peers: list[Peer]
    marks: dict[str, str]
    deadline_s: float
    warm_server: Callable[[], None]
    stored_bytes: Stored
    say: Callable[[str], None]
    first_number: int = 0
    out: set[str] = field(default_factory=set)

    def run(self, rounds: int, until_s: float) -> None:
        """At most so many rounds, the last one begun so that it ends before ``until_s`` (monotonic)."""
        lasted: list[float] = []
        blocks = FAR_BLOCKS if self.network.delay_ms or self.network.rate_mib else BLOCKS
        for number in range(rounds):
            began = time.monotonic()
            if not fits(lasted, until_s - began):
                self.say(f"{self.network.name}: no time for round {number + 1}")
                break
            self.say(f"{self.network.name}: round {number + 1}")
            for block in blocks:
                for index in in_turn(len(self.peers), number):
                    self._block(block, self.peers[index], self.first_number + number)
            if self._time_left() <= 0:
                self.result.notes.append(f"{self.network.name}: time was over in round {number + 1}")
                break
            lasted.append(time.monotonic() - began)
            self.network.rounds = number + 1

    def _block(self, block: Sequence[Step], peer: Peer, number: int) -> None:
        for step in block:
            if peer.name in self.out or self._time_left() <= 0:
                return
            name = step.metric.key if step.metric else step.work.__name__
            try:
                self._step(step, peer, number)
            except WorkFailed as error:
                self._failed(peer, name, number, str(error))
            except (Hung, PeerFailed) as error:
                if self._time_left() > 0:  # else the end of the run cut it off, which is not its fault
                    self._failed(peer, name, number, str(error))
                self.out.add(peer.name)
                peer.abandon()
                return

    def _step(self, step: Step, peer: Peer, number: int) -> None:
        if step.before == "cold":
            self._remount(peer, number, measured=not step.own)
        elif step.before == "dropped":
            drop_kernel_caches()
        root = peer.directory / "out" / peer.name if step.own else peer.directory
        began = time.monotonic()
        watch = processes.Stopwatch(self._roles(peer))
        done = guarded(
            lambda: step.work(root, self.scale, number),
            min(self._limit(step), max(1.0, self._time_left())),
            peer.abandon,
        )
        used = watch.stop()
        if step.metric is not None:
            self._add(step.metric.key, peer, number, done.value(step.metric), done, used)
        if step.drain:
            self._drain(peer, number, began, done, watch)

    def _limit(self, step: Step) -> float:
        """A loop ends by itself after its own limit; a checkpoint is not cut short, and has more time."""
        return CHECKPOINT_LIMIT_S if step.drain else 2 * self.scale.limit_s + HANG_MARGIN_S

    def _drain(
        self, peer: Peer, number: int, began: float, written: Done, watch: processes.Stopwatch
    ) -> None:
        """Until the store has all of it; of those whose objects are files, that is looked up there."""
        limit = time.monotonic() + min(DRAIN_LIMIT_S, max(1.0, self._time_left()))
        peer.drain(limit - time.monotonic())
        if not peer.mountpoint_is_store:
            return
        key = str(own_place(Path("out") / peer.name, number)) + "/"
        while peer.plain_objects and (found := self.stored_bytes(key)) < written.bytes:
            if time.monotonic() > limit:
                raise PeerFailed(
                    f"{found} of {written.bytes} bytes are in the store, and it says that it is done"
                )
            time.sleep(LISTING_POLL_S)
        done = Done(seconds=time.monotonic() - began, operations=written.operations, bytes=written.bytes)
        self._add(STORED.key, peer, number, done.seconds, done, watch.stop())

    def _remount(self, peer: Peer, number: int, *, measured: bool) -> None:
        """Mounted anew with nothing local, and the server's data in its page cache."""
        peer.unmount()
        peer.forget()
        self.warm_server()
        watch = processes.Stopwatch(self._roles(peer))
        began = time.monotonic()
        peer.mount()
        done = Done(seconds=time.monotonic() - began, operations=1)
        if not peer.mountpoint_is_store:
            drop_kernel_caches()
            self.warm_server()
        elif measured:
            self._add(MOUNT.key, peer, number, done.seconds, done, watch.stop())

    def _roles(self, peer: Peer) -> dict[str, list[str]]:
        roles = {role: [mark] for role, mark in self.marks.items() if role not in ("redis",)}
        roles["daemon"] = [peer.mark]
        roles["metadata"] = [self.marks[role] for role in peer.companions()]
        return roles

    def _add(
        self, metric: str, peer: Peer, number: int, value: float, done: Done, used: dict[str, float]
    ) -> None:
        now, peak = processes.resident(peer.mark)
        about = next(each for each in self.result.peers if each.name == peer.name)
        about.peak_bytes = max(about.peak_bytes, peak)
        self.result.values.append(
            Value(
                network=self.network.name, metric=metric, peer=peer.name, round=number, value=value,
                done=done, cpu_s=used, resident_bytes=now,
            )
        )  # fmt: skip

    def _failed(self, peer: Peer, what: str, number: int, reason: str) -> None:
        self.say(f"{self.network.name}: {peer.name}: {what}: {reason.splitlines()[0]}")
        self.result.failures.append(
            Failure(network=self.network.name, peer=peer.name, what=what, round=number, reason=reason)
        )

    def _time_left(self) -> float:
        return self.deadline_s - time.monotonic()

    @contextlib.contextmanager
    def all_mounted(self) -> Iterator[None]:
        """Mount every peer; at the end nothing of them is left, whatever has happened."""
        try:
            for peer in self.peers:
                try:
                    peer.mount()
                except PeerFailed as error:
                    self._failed(peer, "mount", self.first_number, str(error))
                    self.out.add(peer.name)
                    peer.abandon()
            yield
        finally:
            for peer in self.peers:
                try:
                    peer.unmount()
                except PeerFailed as error:
                    if peer.name not in self.out:
                        self._failed(peer, "unmount", self.first_number, str(error))
                finally:
                    peer.abandon()


def drop_kernel_caches() -> None:
    """Pages, names and inodes, of the whole machine. Without the right to, nothing; the report says so."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def may_drop() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def read_through(files: Sequence[tuple[Path, int]]) -> None:
    """Read these parts of files, from their beginning, so that they are in the page cache."""
    memory = bytearray(4 * 1024 * 1024)
    for path, length in files:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            while length > 0 and (count := file.readinto(memory)):
                length -= count
