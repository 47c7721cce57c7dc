"""kill -9 at random moments: what the tier says afterwards is true, and no acknowledged write is lost."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import trio

from tests.support import cache_crasher as crasher
from tests.support.tiers import BLOCK, RangeStore, body_of, device_bytes, opened_cache
from tierfs.cache import blocks


def run_and_kill(seconds: float, *arguments: str) -> None:
    command = [sys.executable, "-m", "tests.support.cache_crasher", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        assert process.poll() is None, process.stdout.read()
        process.send_signal(signal.SIGKILL)


async def test_a_killed_reader_leaves_a_true_index(tmp_path):
    dice = random.Random(1)
    store = RangeStore()
    bodies = crasher.objects(store)
    found = 0
    for round_ in range(6):
        run_and_kill(dice.uniform(0.05, 0.7), "read", str(tmp_path), str(round_))
        async with opened_cache(store, crasher.settings(tmp_path)) as cache:
            (tier,) = cache.tiers
            for ref, body in bodies.items():
                for number, low, high in blocks.extent_spans(0, ref.size_bytes):
                    extent = tier.presence.extent(ref.content_id, number)
                    for first, count in blocks.runs(extent.present if extent else 0):
                        start = low + first * BLOCK
                        stop = min(start + count * BLOCK, high)
                        if await tier.read_blocks(ref.content_id, start, stop) != body[start:stop]:
                            # Unlinked, and killed before the index was committed: that makes its records void.
                            assert tier.presence.size_of(ref.content_id) == 0
                            break
                        found += stop - start
            assert tier.damaged_blocks == 0
            await tier.walked.wait()
            with trio.move_on_after(10):
                while abs(device_bytes(tmp_path / "t") - tier.ledger.data_bytes) > 2 * BLOCK:
                    await trio.sleep(0.02)
            assert abs(device_bytes(tmp_path / "t") - tier.ledger.data_bytes) <= 2 * BLOCK
            assert device_bytes(tmp_path / "t") <= crasher.CAPACITY_BYTES + BLOCK
    assert found > 0


async def test_a_killed_writer_loses_no_acknowledged_write(tmp_path):
    dice = random.Random(2)
    acknowledged = 0
    for round_ in range(6):
        directory, journal = tmp_path / f"r{round_}", tmp_path / f"j{round_}"
        run_and_kill(dice.uniform(0.02, 0.4), "write", str(directory), str(round_), str(journal))
        done = journal.stat().st_size if journal.exists() else 0
        acknowledged += done
        await check_writes(directory, round_, done)
    assert acknowledged > 100


async def check_writes(directory: Path, seed: int, done: int) -> None:
    store = RangeStore()
    models = []
    for number in range(len(crasher.CONTENTS)):
        base = crasher.base_of(store, number)
        models.append(bytearray() if base is None else bytearray(body_of(crasher.BASE_BYTES, number)))
    operations = crasher.operations(seed)
    for number, kind, offset, data in itertools.islice(operations, done):
        model = models[number]
        if kind == "truncate":
            del model[offset:]
            model.extend(bytes(offset - len(model)))
        else:
            model.extend(bytes(max(0, offset - len(model))))
            model[offset : offset + len(data)] = data
    last_number, last_kind, last_offset, last_data = next(operations)
    async with opened_cache(store, crasher.settings(directory)) as cache:
        assert len(cache.dirty_contents()) == len(crasher.CONTENTS)
        for number, content_id in enumerate(crasher.CONTENTS):
            staging = await cache.open_staging(content_id)
            assert staging is not None
            found = await staging.read(0, staging.size_bytes)
            model = bytes(models[number])
            if number != last_number:
                assert found == model
            elif last_kind == "write":
                # The write that was under way may be there, or not, or in part; the rest is what it was.
                end = last_offset + len(last_data)
                assert found[:last_offset].ljust(last_offset, b"\0") == model[:last_offset].ljust(last_offset, b"\0")
                assert found[end:] == model[end:]
            else:
                assert found in (model, model[:last_offset].ljust(last_offset, b"\0"))
