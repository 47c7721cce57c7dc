"""How one file is being read, and what to fetch ahead of it. Pure: no I/O, no clock, no tasks.

One detector per inode, not per handle: several processes may read one file through one descriptor, or
one process through several; what the daemon sees is their requests in one mixed sequence. So the
detector keeps up to ``MAX_STREAMS`` streams, and a request belongs to the stream that it continues.

* *Sequential*: a request that starts where a stream has arrived (or a little beside it: the kernel sends
  the parts of one read-ahead out of order, and skips pages it has). From the third request on (sooner at
  the start of the file, or if requests are large) the stream has a window of bytes to be fetched ahead of
  it. The window starts at 1 MiB and doubles up to the limit while the reader catches up with the fetches;
  a reader that never waits keeps a small one. The limit is shared by the streams of the file.
* *Strided* (also backwards): three requests at one distance. Then the places of the next ones are fetched.
* *Random*: everything else. It fetches nothing; and the more of it there is, the more evidence a new
  stream has to bring, so that chance neighbours in a random sequence fetch nothing either.

What is returned as a range counts as fetched; the caller says ``dropped`` if it could not take it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MIB = 1024 * 1024

MAX_STREAMS = 16
FIRST_WINDOW_BYTES = MIB
UNHURRIED_WINDOW_BYTES = 16 * MIB
"""The window of a reader that does not wait for fetches grows no further than this."""
MIN_PIECE_BYTES = MIB
USUAL_PIECE_BYTES = 2 * MIB
"""Large enough that a request costs little beside its bytes."""
MAX_PIECE_BYTES = 8 * MIB
PIECES_PER_WINDOW = 16
"""A full window is in flight in about as many requests as it takes to fill a fast link."""
BEHIND_BYTES = 4 * MIB
BESIDE_BYTES = 2 * MIB
"""How far behind, and how far past its end, a request may be and still belong to an established stream."""
REQUESTS_BEFORE_PREFETCH = 3
LARGE_REQUEST_BYTES = 256 * 1024
"""Who asks for this much at once counts as having asked twice."""
MAX_RANDOM_SCORE = 24
STRAY_REQUESTS = 64
"""An established stream that gets this many requests beside its end, and none at it, is none."""
STRIDES_AHEAD = 8
STRIDE_SPAN_BYTES = MIB
"""Small strides are fetched further ahead, until they span this much."""


class Range(NamedTuple):
    """Bytes of a file to fetch, from ``offset_bytes``; never empty, never past the end of the file."""

    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.length_bytes


@dataclass(slots=True, eq=False)
class _Stream:
    position: int
    """Where the next request is expected."""
    ahead: int
    """End of what has been asked to be fetched for it."""
    used: int
    """Number of the request that was its last."""
    requests: int = 1
    window: int = 0
    grow_at: int = 0
    stray: int = 0


@dataclass(slots=True, eq=False)
class _Stride:
    """Requests of ``length`` bytes, each ``step`` bytes (negative: backwards) after the one before."""

    last: int
    step: int
    length: int
    ahead: int
    """How many steps after ``last`` have been asked to be fetched."""
    depth: int = 1


@dataclass(slots=True, eq=False)
class PatternDetector:
    """See the module docstring. ``limit_bytes``: the largest sum of the windows of all streams."""

    size_bytes: int
    limit_bytes: int
    _streams: list[_Stream] = field(default_factory=list)
    """Most recently used first."""
    _count: int = 0
    _random_score: int = 0
    _stride: _Stride | None = None
    _previous: tuple[int, int] | None = None
    """Offset of the last request that continued nothing, and its distance to the one before it."""

    def observe(self, offset: int, length: int, *, waiting: bool = False) -> list[Range]:
        """Note one read request; returns what to fetch now, nearest first (mostly nothing).

        ``waiting``: these bytes had been asked for earlier and have not arrived yet.
        """
        self._count += 1
        streams = self._streams
        stream = streams[0] if streams and streams[0].position == offset else self._find(offset, length)
        if stream is not None:
            if self._random_score:
                self._random_score -= 1
            return self._advance(stream, offset, length, waiting)
        strided = self._match_stride(offset, length)
        if strided is None:
            self._random_score = min(MAX_RANDOM_SCORE, self._random_score + 1)
        sequential = self._begin(offset, length)
        return sequential if strided is None else strided

    def dropped(self, lost: Range) -> None:
        """A range that ``observe`` returned is not being fetched: ask for it again later."""
        for stream in self._streams:
            if stream.position <= lost.end_bytes <= stream.ahead:
                stream.ahead = max(stream.position, min(stream.ahead, lost.offset_bytes))
        if self._stride is not None:
            self._stride.ahead = 0

    def spare_bytes(self, offset: int) -> int:
        """How far the window of the stream that has just read at ``offset`` reaches past the end of the file.

        That is what is left of it when all of this file has been asked for. 0 if there is no such stream.
        """
        for stream in self._streams:
            if stream.window and stream.ahead >= self.size_bytes and offset <= stream.position:
                return max(0, stream.position + stream.window - self.size_bytes)
        return 0

    @property
    def sequential_streams(self) -> int:
        """How many streams have a window now."""
        return sum(1 for stream in self._streams if stream.window)

    # which stream

    def _find(self, offset: int, length: int) -> _Stream | None:
        """The stream that a request continues: at its end, else the nearest one that it is beside."""
        best: _Stream | None = None
        best_distance = 0
        for stream in self._streams:
            gap = offset - stream.position
            if gap == 0:
                return stream
            if stream.window:
                fits = -BEHIND_BYTES <= gap <= BESIDE_BYTES
            else:
                fits = -length < gap <= length
            if fits and (best is None or abs(gap) < best_distance):
                best, best_distance = stream, abs(gap)
        return best

    def _begin(self, offset: int, length: int) -> list[Range]:
        """A request that continues nothing may be the first of a stream."""
        if len(self._streams) >= MAX_STREAMS:
            self._streams.remove(min(self._streams, key=_worth))
        end = offset + length
        evidence = 1 + (offset == 0) + (length >= LARGE_REQUEST_BYTES)
        stream = _Stream(position=end, ahead=end, used=self._count, requests=evidence)
        self._streams.insert(0, stream)
        return self._ahead_of(stream) if self._has_window(stream) else []

    # sequential

    def _advance(self, stream: _Stream, offset: int, length: int, waiting: bool) -> list[Range]:
        end = offset + length
        if offset == stream.position:
            stream.stray = 0
        else:
            stream.stray += 1
            if stream.stray > STRAY_REQUESTS and stream.window:
                stream.window = stream.requests = stream.stray = 0
        stream.used = self._count
        stream.requests += 1
        if end > stream.position:
            stream.position = end
        if self._streams[0] is not stream:
            self._streams.remove(stream)
            self._streams.insert(0, stream)
        if not self._has_window(stream):
            return []
        if stream.ahead < stream.position:
            stream.ahead = stream.position
            waiting = True
        self._grow(stream, waiting)
        return self._ahead_of(stream)

    def _has_window(self, stream: _Stream) -> bool:
        """Whether the stream may be read ahead of; gives it its first window."""
        if not stream.window:
            if stream.requests < REQUESTS_BEFORE_PREFETCH + self._random_score // 4:
                return False
            stream.window = min(FIRST_WINDOW_BYTES, self.limit_bytes)
            stream.grow_at = stream.position + stream.window // 8
        return True

    def _grow(self, stream: _Stream, waiting: bool) -> None:
        """Double the window: soon if the reader waits, else after half of it, and not as far."""
        if stream.position < stream.grow_at:
            return
        most = max(FIRST_WINDOW_BYTES, self.limit_bytes // max(1, self.sequential_streams))
        if not waiting:
            if stream.position < stream.grow_at + stream.window * 3 // 8:
                return
            most = min(most, max(stream.window, UNHURRIED_WINDOW_BYTES))
        stream.window = min(stream.window * 2, most, self.limit_bytes)
        stream.grow_at = stream.position + stream.window // 8

    def _ahead_of(self, stream: _Stream) -> list[Range]:
        """The next pieces of the window, whole ones, aligned so that neighbours never share a block."""
        piece = _piece_bytes(stream.window)
        until = min(stream.position + stream.window, self.size_bytes)
        ranges: list[Range] = []
        while stream.ahead < until:
            end = min((stream.ahead // piece + 1) * piece, self.size_bytes)
            if end > until and ranges:
                break
            if end > until and stream.ahead > stream.position:
                break
            ranges.append(Range(stream.ahead, end - stream.ahead))
            stream.ahead = end
        if ranges and len(self._streams) > 1:
            self._absorb(stream)
        return ranges

    def _absorb(self, stream: _Stream) -> None:
        """Requests of one reader that came out of order may have begun several streams: keep one."""
        for other in self._streams[:]:
            if other is not stream and abs(other.position - stream.position) <= BESIDE_BYTES:
                self._streams.remove(other)

    # strided

    def _match_stride(self, offset: int, length: int) -> list[Range] | None:
        """What to fetch if the request continues or completes a stride; None if it does neither."""
        stride = self._stride
        if stride is not None and offset - stride.last == stride.step:
            stride.last = offset
            stride.ahead = max(0, stride.ahead - 1)
            stride.depth *= 2
            stride.length = max(length, min(stride.length, abs(stride.step)))
        else:
            previous, distance = self._previous or (offset, 0)
            step = offset - previous
            self._previous = (offset, step)
            if step == 0 or step != distance:
                return None
            stride = self._stride = _Stride(last=offset, step=step, length=length, ahead=0)
        self._previous = (offset, stride.step)
        stride.depth = min(stride.depth, max(STRIDES_AHEAD, STRIDE_SPAN_BYTES // abs(stride.step)))
        if stride.ahead > stride.depth // 2:
            return []
        places = [stride.last + stride.step * number for number in range(stride.ahead + 1, stride.depth + 1)]
        stride.ahead = stride.depth
        return _merged(
            Range(start, end - start)
            for place in places
            if (start := max(0, place)) < (end := min(self.size_bytes, place + stride.length))
        )


def _worth(stream: _Stream) -> tuple[bool, int]:
    """Order in which streams are forgotten: those that were never one first, then the longest unused."""
    return (bool(stream.window), stream.used)


def _piece_bytes(window_bytes: int) -> int:
    """Size of one fetch: a quarter of a small window, a fixed part of a large one."""
    usual = min(_power_of_two(window_bytes // 4), USUAL_PIECE_BYTES)
    return min(max(usual, _power_of_two(window_bytes // PIECES_PER_WINDOW), MIN_PIECE_BYTES), MAX_PIECE_BYTES)


def _power_of_two(value: int) -> int:
    """The largest power of two that is not above ``value``; 0 for 0."""
    return 1 << value.bit_length() - 1 if value else 0


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges that touch, joined: a file read backwards in small steps is fetched in large ones."""
    merged: list[Range] = []
    for found in ranges:
        if merged and found.end_bytes == merged[-1].offset_bytes:
            merged[-1] = Range(found.offset_bytes, found.length_bytes + merged[-1].length_bytes)
        else:
            merged.append(found)
    return merged
