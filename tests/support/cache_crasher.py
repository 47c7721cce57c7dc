"""Programs that use the cache until they are killed; see ``tests/unit/test_cache_crash.py``.

    python -m tests.support.cache_crasher read DIRECTORY SEED
    python -m tests.support.cache_crasher write DIRECTORY SEED JOURNAL
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import trio

from tests.support.tiers import BLOCK, MIB, RangeStore, body_of, nvme, opened_cache, settings_for
from tierfs.types import ContentId, ObjectRef

CAPACITY_BYTES = 20 * MIB
SIZES = (3000, 90_000, 250_000, MIB, 9 * MIB, 17 * MIB)
CONTENTS = tuple(ContentId(bytes([number]) * 16) for number in range(1, 5))
BASE_BYTES = 9 * BLOCK - 77


def objects(store: RangeStore) -> dict[ObjectRef, bytes]:
    """The same in every process."""
    found = {}
    for number in range(24):
        body = body_of(SIZES[number % len(SIZES)], number)
        found[store.add(f"k{number}", body)] = body
    return found


def settings(directory: Path):  # type: ignore[no-untyped-def]
    return settings_for(directory, nvme(directory / "t", CAPACITY_BYTES))


async def read_until_killed(directory: Path, seed: int) -> None:
    """Read at random, from more than the tier holds: always fetching, evicting, and sometimes committing."""
    dice = random.Random(seed)
    store = RangeStore()
    bodies = objects(store)
    refs = list(bodies)
    async with opened_cache(store, settings(directory)) as cache, trio.open_nursery() as nursery:

        async def work(seed: int) -> None:
            dice = random.Random(seed)
            while True:
                ref = dice.choice(refs)
                start = dice.randrange(ref.size_bytes)
                length = dice.choice([1000, 200_000, 2 * MIB])
                data = cache.read_nowait(ref, start, length)
                if data is None:
                    data = await cache.read(ref, start, length)
                if data != bodies[ref][start : start + length]:
                    print("wrong bytes", flush=True)
                    os._exit(3)
                if dice.random() < 0.05:
                    await cache.forget(dice.choice(refs).content_id)
                if dice.random() < 0.05:
                    await cache.tiers[0].commit()

        print("ready", flush=True)
        for _ in range(4):
            nursery.start_soon(work, dice.random())  # type: ignore[arg-type]


def operations(seed: int):  # type: ignore[no-untyped-def]
    """Endless (content number, kind, offset, data or size), the same in every process."""
    dice = random.Random(seed)
    while True:
        kind = "truncate" if dice.random() < 0.1 else "write"
        number = dice.randrange(len(CONTENTS))
        offset = dice.randrange(12 * BLOCK)
        length = dice.choice([1, 700, 4096, BLOCK, 3 * BLOCK + 1])
        yield number, kind, offset, dice.randbytes(length)


def base_of(store: RangeStore, number: int) -> ObjectRef | None:
    """Two of the contents are converted, the others are new."""
    return store.add(f"base{number}", body_of(BASE_BYTES, number)) if number % 2 else None


async def write_until_killed(directory: Path, seed: int, journal: Path) -> None:
    """Write at random; every operation is noted in the journal once it was acknowledged."""
    store = RangeStore()
    note = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    async with opened_cache(store, settings(directory)) as cache:
        stagings = []
        for number, content_id in enumerate(CONTENTS):
            base = base_of(store, number)
            if base is None:
                stagings.append(await cache.create_staging(content_id))
            else:
                await cache.read(base, 0, 3 * BLOCK)
                stagings.append(await cache.convert(base, content_id))
        print("ready", flush=True)
        for number, kind, offset, data in operations(seed):
            staging = stagings[number]
            if kind == "truncate":
                await staging.truncate(offset)
            elif not staging.write_nowait(offset, data):
                await staging.write(offset, data)
            os.write(note, b".")
            await trio.lowlevel.checkpoint()


if __name__ == "__main__":
    if sys.argv[1] == "read":
        trio.run(read_until_killed, Path(sys.argv[2]), int(sys.argv[3]))
    else:
        trio.run(write_until_killed, Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
