"""The one table that the demo prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data import MIB
from engine import Status
from epochs import Epoch, Reading
from rich.table import Table

_NONE = "-"
_PART_NAMES = {"sample": "small files, shuffled", "shard": "tar shards", "large": "one large file"}


@dataclass(frozen=True, slots=True)
class Pass:
    """An epoch, and how many bytes came from the store meanwhile."""

    epoch: Epoch
    fetched_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the bytes read for which the store was not asked."""
        size_bytes = self.epoch.total.size_bytes
        return max(0.0, 1 - self.fetched_bytes / size_bytes) if size_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``stored_s``: from the start of the save until all of it was in the store."""

    saved: Reading
    stored_s: float
    restored_local: Reading
    restored_store: Reading


def table(status: Status, passes: Sequence[Pass], checkpoint: Checkpoint) -> Table:
    """``status`` is from after the second epoch, before the checkpoint."""
    found = Table(title="tierfs demo", title_justify="left", show_edge=False, pad_edge=False)
    found.add_column("")
    for name in ("files", "MiB", "seconds", "MiB/s", "hit rate"):
        found.add_column(name, justify="right")
    lookups = sum(tier.hits for tier in status.tiers) + (status.tiers[-1].misses if status.tiers else 0)
    for tier in status.tiers:
        share = f"{tier.hits / lookups:.1%}" if lookups else _NONE
        title = f"tier {tier.name}, of {tier.capacity_bytes / MIB:,.0f} MiB"
        found.add_row(title, f"{tier.files:,}", _mib(tier.used_bytes), _NONE, _NONE, share)
    found.add_section()
    for number, one in enumerate(passes, 1):
        _add_reading(found, f"epoch {number}", one.epoch.total, f"{one.hit_rate:.1%}")
        for kind, part in one.epoch.parts.items():
            _add_reading(found, f"  {_PART_NAMES[kind]}", part)
        found.add_section()
    saved = checkpoint.saved
    in_store = Reading(saved.files, saved.size_bytes, checkpoint.stored_s)
    _add_reading(found, "checkpoint: writers blocked", saved)
    _add_reading(found, "checkpoint: in the store after", in_store)
    _add_reading(found, "restore from the tiers", checkpoint.restored_local)
    _add_reading(found, "restore from the store", checkpoint.restored_store)
    return found


def _add_reading(found: Table, title: str, reading: Reading, hit_rate: str = _NONE) -> None:
    found.add_row(
        title,
        f"{reading.files:,}",
        _mib(reading.size_bytes),
        f"{reading.seconds:.2f}",
        f"{reading.mib_per_s:,.0f}",
        hit_rate,
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f}"
