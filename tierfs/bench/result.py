"""What a run found. Its JSON is public: fields are only ever added, with a default; else ``VERSION`` rises.

``schema.json`` beside this module is the JSON Schema of it (``json_schema``), for readers in other languages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from tierfs.bench.histogram import Histogram
from tierfs.errors import ConfigError, FormatError

FORMAT = "tierfs-bench"
VERSION = 1
GIB = 1024**3

Parameter = str | int | float | bool


class Timeline(msgspec.Struct, kw_only=True):
    """Bytes moved (of metadata: operations done) in each slot of ``slot_s`` seconds from the start on.

    ``count_of`` says which of the two.
    """

    slot_s: float
    amounts: list[int]
    count_of: str = "bytes"


class Measurement(msgspec.Struct, kw_only=True):
    """One load, in one variant, once.

    ``workload`` and ``variant`` name it; ``parameters`` say the same for programs (``block_bytes``,
    ``workers``, ``way``, ``state``...). ``operation``: what one operation is. ``seconds``: from the first
    start to the last end. ``latency``: of single operations. ``cpu_s``: CPU seconds that it took, by who
    spent them: ``bench`` (the measuring processes, system calls included), and of a tierfs mount ``engine``
    and ``front``; what kernel threads do is in none of them.
    """

    workload: str
    variant: str
    parameters: dict[str, Parameter] = {}
    operation: str = ""
    operations: int = 0
    bytes: int = 0
    seconds: float = 0.0
    latency: Histogram | None = None
    timeline: Timeline | None = None
    cpu_s: dict[str, float] = {}
    notes: list[str] = []

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def operations_per_s(self) -> float:
        return self.operations / self.seconds if self.seconds else 0.0

    def cpu_s_per_gib(self, who: str) -> float | None:
        """None where that is not known, or no data were moved."""
        return self.cpu_s[who] * GIB / self.bytes if who in self.cpu_s and self.bytes else None


class Skipped(msgspec.Struct, kw_only=True):
    """What was not measured, and why. ``variant`` empty: the whole load. ``failed``: it was tried."""

    workload: str
    reason: str
    variant: str = ""
    failed: bool = False


class Machine(msgspec.Struct, kw_only=True):
    """What it was measured on. ``load``: of the minute before the run."""

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    system: str
    load: float


class Target(msgspec.Struct, kw_only=True):
    """What was measured. ``kind``: ``directory``, ``tierfs`` (a mount) or ``store`` (directly).

    ``file_system``: type and source of the mount it lies on. ``details``: of a tierfs mount tiers, front...
    """

    name: str
    kind: str
    file_system: str = ""
    details: dict[str, str] = {}


class BenchResult(msgspec.Struct, kw_only=True):
    """One run of ``tierfs bench``. ``started``: ISO 8601 with the time zone."""

    format: str = FORMAT
    version: int = VERSION
    started: str
    seconds: float
    command: str
    target: Target
    machine: Machine
    versions: dict[str, str] = {}
    options: dict[str, Parameter] = {}
    cold: str = ""
    """What "cold" means for this target."""
    loop_cost_ns: float = 0.0
    """What our own loops add to the time of each operation; fio's do not count it."""
    measurements: list[Measurement] = []
    skipped: list[Skipped] = []
    notes: list[str] = []

    def of(self, workload: str, **parameters: Parameter) -> list[Measurement]:
        """The measurements of a load that have these parameters."""
        return [
            found
            for found in self.measurements
            if found.workload == workload
            and all(found.parameters.get(name) == value for name, value in parameters.items())
        ]


def encode(result: BenchResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def decode(data: bytes | str, *, name: str = "the result") -> BenchResult:
    """Raises FormatError for another version, ConfigError for what is no result; both say ``name``."""
    try:
        head: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ConfigError(f"{name} was not written by 'tierfs bench --json'")
    if head.get("version") != VERSION:
        raise FormatError(f"{name} has version {head.get('version')}; this tierfs reads version {VERSION}")
    try:
        return msgspec.json.decode(data, type=BenchResult)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from error


def write_result(result: BenchResult, path: str | os.PathLike[str]) -> None:
    """Raises ConfigError."""
    try:
        Path(path).write_bytes(encode(result))
    except OSError as error:
        raise ConfigError(f"cannot write {os.fspath(path)}: {error.strerror}") from error


def read_result(path: str | os.PathLike[str]) -> BenchResult:
    """Raises ConfigError or FormatError, naming ``path``."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    return decode(data, name=os.fspath(path))


def json_schema() -> dict[str, Any]:
    """JSON Schema of ``BenchResult``."""
    return msgspec.json.schema(BenchResult)
