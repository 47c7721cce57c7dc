"""What a writer's log allows its directory to hold.

After a *crash* of any process everything that was acknowledged is there: only the call that was under way, and
those that failed, may have happened or not. After a *power cut* names are as they were at some moment since the
last acknowledged fsync, and every page of a file is as its last fsync left it or newer. (``SEMANTICS.md``.)

``History.problems`` compares; an empty list means that all is well. ``whole_at_some_time`` says whether bytes are
all those that a file had at one moment: what an object in the store must be.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.campaign.content import CELL_BYTES, ZEROS, cells, file_in

PAGE_BYTES = 4096
ENDLESS = 1 << 62
NEVER = -1


@dataclass(slots=True)
class Call:
    number: int
    what: dict[str, Any]
    acknowledged: bool = False
    error: int = 0


@dataclass(slots=True)
class _Change:
    """Bytes of one write, or zeros from a truncate on."""

    at: int
    write: int
    start: int
    stop: int
    sure: bool


@dataclass(slots=True)
class _File:
    changes: list[_Change] = field(default_factory=list)
    synced_at: int = NEVER
    """Number of the last acknowledged fsync."""
    closed_at: int = NEVER
    """Number of the last acknowledged close."""

    def sizes(self, floor: int) -> tuple[int, int]:
        """The smallest and the largest size that it may have, if all up to number ``floor`` is certain."""
        sizes = {0}
        for change in self.changes:
            after = {_size_after(change, size) for size in sizes}
            if change.sure and change.at <= floor:
                sizes = after
            else:
                sizes |= after
        return min(sizes), max(sizes)

    def problem(self, file: str, data: bytes, floor: int) -> str | None:
        """What is wrong with these bytes; None if nothing is."""
        low, high = self.sizes(floor)
        if not low <= len(data) <= high:
            return f"{len(data)} bytes, not {low} to {high}"
        edges = {0, len(data)}
        for change in self.changes:
            edges |= {min(change.start, len(data)), min(change.stop, len(data))}
        ordered = sorted(edges)
        for start, stop in itertools.pairwise(ordered):
            writes = self._writes_at(start, floor)
            step = stop - start if len(writes) == 1 else PAGE_BYTES
            at = start
            while at < stop:
                end = min(stop, at - at % PAGE_BYTES + PAGE_BYTES) if step == PAGE_BYTES else stop
                if all(data[at:end] != cells(file, write, at, end) for write in writes):
                    shown = bytes(data[at : min(end, at + 64)])
                    return f"bytes {at} to {end} are of none of the writes {writes}: {shown!r}"
                at = end
        return None

    def _writes_at(self, place: int, floor: int) -> list[int]:
        found = [ZEROS]
        for change in self.changes:
            if change.start <= place < change.stop:
                if change.sure and change.at <= floor:
                    found = [change.write]
                else:
                    found.append(change.write)
        return found

    def at(self, file: str, number: int) -> bytes:
        """All bytes after call ``number``, if everything up to there happened."""
        data = bytearray()
        for change in self.changes:
            if change.at > number:
                break
            if change.stop == ENDLESS:
                del data[change.start :]
                data.extend(bytes(change.start - len(data)))
            elif change.stop > change.start:
                data.extend(bytes(max(0, change.start - len(data))))
                data[change.start : change.stop] = cells(file, change.write, change.start, change.stop)
        return bytes(data)


def _size_after(change: _Change, size: int) -> int:
    if change.stop == ENDLESS:
        return change.start
    return max(size, change.stop) if change.stop > change.start else size


class History:
    """One writer's log; made anew when that has grown."""

    def __init__(self, log: Path) -> None:
        self.calls = _read(log)
        self.files: dict[str, _File] = {}
        self._acknowledged_sync = NEVER
        for call in self.calls:
            self._take_in(call)

    @property
    def acknowledged(self) -> int:
        return sum(call.acknowledged for call in self.calls)

    def errors(self) -> dict[int, int]:
        """How many calls failed, by errno."""
        found: dict[int, int] = {}
        for call in self.calls:
            if call.error:
                found[call.error] = found.get(call.error, 0) + 1
        return found

    def _take_in(self, call: Call) -> None:
        what, number, sure = call.what, call.number, call.acknowledged
        match what["do"]:
            case "create":
                self.files.setdefault(what["file"], _File())
            case "write":
                start, stop = what["offset"], what["offset"] + what["length"]
                self.files[what["file"]].changes.append(_Change(number, number, start, stop, sure))
            case "truncate":
                self.files[what["file"]].changes.append(_Change(number, ZEROS, what["size"], ENDLESS, sure))
            case "fsync" if sure:
                self.files[what["file"]].synced_at = self._acknowledged_sync = number
            case "close" if sure:
                self.files[what["file"]].closed_at = number
            case "fsyncdir" if sure:
                self._acknowledged_sync = number

    def problems(self, found: Mapping[str, bytes], *, power_cut: bool = False) -> list[str]:
        """What is wrong with a directory that holds these files, after all processes of the mount are gone."""
        last = self.calls[-1].number if self.calls else 0
        best: list[str] | None = None
        first = self._acknowledged_sync if power_cut else last
        loose = self._loose_names()
        for names in self._name_states(max(0, first), last):
            problems = self._differences(names, loose, found, power_cut)
            if not problems:
                return []
            if best is None or len(problems) <= len(best):
                best = problems
        return best or []

    def _loose_names(self) -> set[str]:
        """Names whose change failed with an error: anything may be there."""
        return {
            str(call.what[key])
            for call in self.calls
            for key in ("name", "new_name")
            if call.error and key in call.what and call.what["do"] in ("create", "rename", "unlink")
        }

    def _name_states(self, first: int, last: int) -> list[dict[str, str]]:
        """name -> file at each moment from after call ``first`` on; the one under way may have happened."""
        names: dict[str, str] = {}
        states: list[dict[str, str]] = []
        for call in self.calls:
            if call.number > first and not states:
                states.append(dict(names))
            if call.error:
                continue
            if not call.acknowledged and call.number == last and not states:
                states.append(dict(names))
            _change_names(names, call.what)
            if call.number >= first and (not states or names != states[-1]):
                states.append(dict(names))
        return states or [names]

    def _differences(
        self, names: Mapping[str, str], loose: set[str], found: Mapping[str, bytes], power_cut: bool
    ) -> list[str]:
        problems = []
        for name in sorted((names.keys() | found.keys()) - loose):
            if name not in found:
                problems.append(f"{name} (file {names[name]}) is gone")
            elif name not in names:
                problems.append(f"{name} is there, with {len(found[name])} bytes of {file_in(found[name])}")
            else:
                wrong = self.content_problem(names[name], found[name], power_cut=power_cut)
                if wrong:
                    problems.append(f"{name} (file {names[name]}): {wrong}")
        for name in sorted(found.keys() & loose):
            file = file_in(found[name])
            if file is not None and file not in self.files and len(found[name]) >= CELL_BYTES:
                problems.append(f"{name} holds what nobody wrote: {found[name][:64]!r}")
        return problems

    def names(self) -> dict[str, str]:
        """name -> file, if nothing was renamed or removed."""
        return {call.what["name"]: call.what["file"] for call in self.calls if call.what["do"] == "create"}

    def content_problem(
        self, file: str, data: bytes, *, power_cut: bool = False, floor: int | None = None
    ) -> str | None:
        """What is wrong with these bytes of that file; ``floor``: up to which call they must be there."""
        if floor is None:
            floor = self.files[file].synced_at if power_cut else ENDLESS
        return self.files[file].problem(file, data, floor)

    def whole_at_some_time(self, data: bytes) -> bool:
        """Whether some file had exactly these bytes at one moment. Failed writes may have happened in part."""
        file = file_in(data)
        if file is None:
            return True  # empty, or nothing but zeros: whose it is cannot be said
        if len(data) < CELL_BYTES:
            return any(self._had(name, data) for name in self.files)  # its first cell is cut off
        return file in self.files and self._had(file, data)

    def _had(self, file: str, data: bytes) -> bool:
        known = self.files[file]
        if any(not change.sure for change in known.changes):
            return known.problem(file, data, NEVER) is None
        return any(known.at(file, change.at) == data for change in known.changes)


def _change_names(names: dict[str, str], what: Mapping[str, Any]) -> None:
    match what["do"]:
        case "create":
            names[what["name"]] = what["file"]
        case "rename" if what["name"] in names:
            names[what["new_name"]] = names.pop(what["name"])
        case "unlink":
            names.pop(what["name"], None)


def _read(log: Path) -> list[Call]:
    calls: dict[int, Call] = {}
    text = log.read_bytes() if log.exists() else b""
    for line in text.split(b"\n")[:-1]:
        entry = json.loads(line)
        number = entry["n"]
        if "do" in entry:
            calls[number] = Call(number, entry)
        else:
            calls[number].acknowledged = bool(entry.get("ok"))
            calls[number].error = int(entry.get("error", 0))
    return [calls[number] for number in sorted(calls)]
