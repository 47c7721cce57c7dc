"""Who saves: this process's rank, and how the ranks hear of each other. Standard library only.

In this order: ``rank`` and ``world_size`` as given; ``torch.distributed``, if this process has initialised
it; ``RANK`` and ``WORLD_SIZE`` in the environment, as torchrun and others set them; else this process alone.
Only ``torch.distributed`` reaches other nodes. Without it ranks find each other through the mount, and so
have to be on one node.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol

from tierfs.errors import CheckpointError, ConfigError


class Group(Protocol):
    """What is needed of a process group."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, once everybody has given one."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """``group`` None: the ranks hear of each other through the mount."""

    rank: int
    world_size: int
    group: Group | None = None


def find(rank: int | None, world_size: int | None) -> Ranks:
    """See the module docstring. Raises ``ConfigError``, ``CheckpointError``."""
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise ConfigError("checkpoint: give both, rank and world_size, or none of them")
        return _checked(rank, world_size)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        number, size = distributed.get_rank(), distributed.get_world_size()
        return Ranks(number, size, _TorchGroup(distributed, size) if size > 1 else None)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        number, size = _number("RANK"), _number("WORLD_SIZE")
        if "LOCAL_WORLD_SIZE" in os.environ and _number("LOCAL_WORLD_SIZE") < size:
            raise CheckpointError(
                f"WORLD_SIZE is {size}, LOCAL_WORLD_SIZE less: ranks on several nodes find each other "
                "through torch.distributed, which is not initialised"
            )
        return _checked(number, size)
    return Ranks(0, 1)


def node_of(directory: str) -> str:
    """Names this machine and the mount at (or above) ``directory``: ranks with the same one share files."""
    while not os.path.exists(directory):
        directory = os.path.dirname(directory)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat(directory).st_dev}"


def process() -> dict[str, Any]:
    """Names this process, for ``is_gone``."""
    return {"pid": os.getpid(), "start": _start_of(os.getpid()), "ns": _pid_namespace()}


def is_gone(told: dict[str, Any]) -> bool:
    """Whether a process that ``process`` named has ended. False if it cannot be seen from here."""
    if told.get("ns") != _pid_namespace():
        return False
    return _start_of(int(told["pid"])) != told.get("start")


class _TorchGroup:
    """The default process group."""

    def __init__(self, distributed: Any, size: int) -> None:
        self._distributed = distributed
        self._size = size

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._size
        self._distributed.all_gather_object(values, value)
        return values


def _checked(rank: int, world_size: int) -> Ranks:
    if not 0 <= rank < world_size:
        raise ConfigError(f"checkpoint: rank {rank} of {world_size}")
    return Ranks(rank, world_size)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"checkpoint: {name}={os.environ[name]!r} in the environment is no number"
        ) from None


def _start_of(pid: int) -> str | None:
    """When the process was started, in ticks (proc(5), stat, field 22); None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
