"""The one table that the demo prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data import MIB
from engine import Status
from epochs import Epoch, Reading
from rich.table import Table

_NONE = "-"
_PART_NAMES = {"sample": "small files, shuffled", "shard": "tar shards", "large": "one large file"}


@dataclass(frozen=True, slots=True)
class Pass:
    """An epoch, and what the mount said before and after it."""

    epoch: Epoch
    before: Status
    after: Status

    @property
    def hit_rate(self) -> float:
        """Share of the bytes read for which the store was not asked."""
        fetched_bytes = self.after.fetched_bytes - self.before.fetched_bytes
        return max(0.0, 1 - fetched_bytes / self.epoch.total.size_bytes)

    def tier_shares(self) -> list[float]:
        """For each tier, the share of look-ups that it answered."""
        tiers = list(zip(self.before.tiers, self.after.tiers, strict=True))
        hits = [after.hits - before.hits for before, after in tiers]
        # What no tier has is a miss of every one of them.
        misses = max((after.misses - before.misses for before, after in tiers), default=0)
        return [count / (sum(hits) + misses) if sum(hits) + misses else 0.0 for count in hits]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``stored_s``: from the start of the save until all of it was in the store."""

    saved: Reading
    stored_s: float
    restored_local: Reading
    restored_store: Reading


def table(passes: Sequence[Pass], files_in_tiers: Mapping[str, int], checkpoint: Checkpoint) -> Table:
    """Everything that was measured. The tiers are shown as the last epoch left them."""
    found = Table(
        title="tierfs demo",
        title_justify="left",
        caption="Hit rate of an epoch: share of its bytes that did not come from the store. "
        "Of a tier: share of the last epoch's look-ups that it answered.",
        caption_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    found.add_column("")
    for name in ("files", "MiB", "seconds", "MiB/s", "hit rate"):
        found.add_column(name, justify="right")
    for tier, share in zip(passes[-1].after.tiers, passes[-1].tier_shares(), strict=True):
        title = f"tier {tier.name}, of {tier.capacity_bytes / MIB:,.0f} MiB"
        found.add_row(
            title,
            f"{files_in_tiers.get(tier.name, 0):,}",
            _mib(tier.used_bytes),
            _NONE,
            _NONE,
            f"{share:.1%}",
        )
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
