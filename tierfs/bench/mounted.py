"""A tierfs mount, asked through its control channel."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from tierfs.bench import daemons
from tierfs.control import registry
from tierfs.control.client import ControlClient
from tierfs.control.protocol import EvictRequest, FlushReply, FlushRequest, PathsReply, StatusReply
from tierfs.errors import ControlError, TierfsError
from tierfs.mountpoint import canonical, mount_of

ANSWER_S = 30.0
BATCH_PATHS = 5000
AGAIN_S = 0.05


def find(path: str) -> TierfsMount | str | None:
    """The mount that ``path`` lies on; None if it lies on none; a text: why its engine cannot be asked."""
    if mount_of(canonical(path)) is None:
        return None
    try:
        found = registry.find(path)
        if found.record is None:
            return "this user has no record of its engine"
        mount = TierfsMount(found.mountpoint, found.record.socket_path)
        mount.status()
    except TierfsError as error:
        return str(error)
    return mount


class TierfsMount:
    """Raises ControlError and its children."""

    def __init__(self, mountpoint: str, socket_path: str) -> None:
        self.mountpoint = mountpoint
        self._socket_path = socket_path

    def status(self) -> StatusReply:
        with ControlClient(self._socket_path, timeout_s=ANSWER_S) as client:
            reply: StatusReply = client.call("status")
            return reply

    def flush(self, directory: str, limit_s: float) -> FlushReply:
        """Wait until what lies below ``directory`` is in the store."""
        request = FlushRequest(path=self._relative(directory), timeout_s=max(limit_s, 0.1))
        with ControlClient(self._socket_path, timeout_s=None) as client:
            reply: FlushReply = client.call("flush", request)
            return reply

    def evict(self, paths: Sequence[str], limit_s: float) -> list[str]:
        """Drop the local copies, and see to it that they are gone; why some stayed.

        The engine passes over what it is about to make a clean copy of after an upload, and what somebody
        has open: what is still resident is evicted again for as long as ``limit_s``.
        """
        stop_s = time.monotonic() + limit_s
        left = list(paths)
        while True:
            failed = self._evict_once(left)
            left = [path for path in left if resident_bytes(path)]
            if failed or not left:
                return failed
            if time.monotonic() > stop_s:
                return [f"{path} is still local" for path in left]
            time.sleep(AGAIN_S)

    def _evict_once(self, paths: Sequence[str]) -> list[str]:
        failed: list[str] = []
        with ControlClient(self._socket_path, timeout_s=None) as client:
            for batch in _batches([self._relative(path) for path in paths]):
                reply: PathsReply = client.call("evict", EvictRequest(paths=batch))
                failed += [failure.message for failure in reply.failed]
        return failed

    def cpu_s(self) -> dict[str, float]:
        """Of the engine and, where there is one, of the native front, so far."""
        try:
            status = self.status()
        except ControlError:
            return {}
        pids = {"engine": status.engine.pid}
        if status.front.kind == "native" and status.front.pid:
            pids["front"] = status.front.pid
        spent = {who: daemons.cpu_s(pid) for who, pid in pids.items()}
        return {who: seconds for who, seconds in spent.items() if seconds is not None}

    def tiers_bytes(self) -> int:
        """How much they hold together."""
        return sum(tier.capacity_bytes for tier in self.status().tiers)

    def details(self) -> dict[str, str]:
        """What a reader of a report has to know about it."""
        status = self.status()
        tiers = ", ".join(
            f"{tier.name} {tier.capacity_bytes / 1024**3:.1f} GiB ({tier.path})" for tier in status.tiers
        )
        return {
            "source": status.source,
            "mountpoint": status.mountpoint,
            "tierfs": status.version,
            "front": f"{status.front.kind} ({status.front.why})",
            "tiers": tiers or "none",
        }

    def _relative(self, path: str) -> bytes:
        relative = os.path.relpath(path, self.mountpoint)
        return b"" if relative == "." else os.fsencode(relative)


def resident_bytes(path: str) -> int:
    """How much of a file the tiers hold."""
    return int(os.getxattr(path, "user.tierfs.resident"))


def is_dirty(path: str) -> bool:
    """Whether the store does not have it as it is."""
    return os.getxattr(path, "user.tierfs.dirty") != b"false"


def _batches(paths: Sequence[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(paths), BATCH_PATHS):
        yield list(paths[start : start + BATCH_PATHS])
