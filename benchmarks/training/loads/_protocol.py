"""What the scripts share: the command line, and the line with the results that they print last."""

import json
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

RESULT = "RESULT "
Scale = dict[str, int]


def main(make: Callable[[Path, Scale], None], run: Callable[[Path, Scale], dict[str, float]]) -> None:
    """``SCRIPT make|run DIRECTORY SCALE``; the scale is JSON."""
    verb, directory, scale = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    if verb == "make":
        directory.mkdir(parents=True)
        make(directory, scale)
        print(RESULT + "{}")
    else:
        print(RESULT + json.dumps(run(directory, scale)), flush=True)


def sealed(number: int, body: bytes) -> bytes:
    """A sample that knows its number and its checksum."""
    content = number.to_bytes(8, "little") + body
    return content + zlib.crc32(content).to_bytes(4, "little")


def opened(data: bytes) -> int:
    """The number of a sample. Raises ValueError if a byte of it is wrong."""
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError(f"a sample of {len(data)} bytes has a wrong checksum")
    return int.from_bytes(data[:8], "little")


def expect(found: Sequence[int], count: int) -> None:
    """Every sample exactly once. Raises ValueError."""
    if sorted(found) != list(range(count)):
        raise ValueError(f"{len(found)} samples, {len(set(found))} different ones, instead of {count}")


def timed_epochs(epoch: Callable[[], list[int]], count: int, epochs: int) -> dict[str, float]:
    """Samples per second of the first epoch, and the best of the later ones."""
    rates = []
    for _ in range(epochs):
        began = time.perf_counter()
        found = epoch()
        rates.append(count / (time.perf_counter() - began))
        expect(found, count)
    return {"cold": rates[0], "warm": max(rates[1:])}


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
