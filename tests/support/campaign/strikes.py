"""What strikes, by name. Each is called while writers run, and returns when the fault itself is over.

What is not said here is done by ``run``: the writers are started before and stopped after, the mount is started
again if it is gone, and everything is checked.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress

from tests.support.campaign.arena import Arena, Failed
from tests.support.mount import wait_until

Strike = Callable[[Arena, random.Random], None]
READ_ERRORS = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE})


def _kill(what: str) -> Strike:
    def strike(arena: Arena, chance: random.Random) -> None:
        arena.kill(what)
        arena.check_objects()
        if arena.is_mounted:
            arena.let_write(chance.randint(1, 15))

    return strike


def _kill_the_applications(arena: Arena, chance: random.Random) -> None:
    for writer in arena.writers:
        writer.kill()


def _kill_in_an_outage(arena: Arena, chance: random.Random) -> None:
    arena.server.stop()
    arena.let_write(chance.randint(3, 20))
    arena.kill(chance.choice(["engine", "both"]))
    if arena.is_mounted:
        arena.let_write(chance.randint(1, 10))
    arena.heal()


def _outage(arena: Arena, chance: random.Random) -> None:
    arena.server.stop()
    arena.let_write(chance.randint(5, 40))
    arena.check_objects()
    arena.heal()


def _storm(*kinds: str, probability: float, seconds: float = 0.0, operation: str = "*") -> Strike:
    """Requests go wrong for a while; meanwhile old files are evicted and read: the right bytes, or an error."""

    def strike(arena: Arena, chance: random.Random) -> None:
        arena.server.random = random.Random(chance.random())
        for kind in kinds:
            arena.server.fault(kind, operation=operation, probability=probability, seconds=seconds)
        arena.let_write(chance.randint(5, 30))
        _read_evicted(arena, chance)
        arena.check_objects()
        arena.heal()

    return strike


def _read_evicted(arena: Arena, chance: random.Random) -> None:
    known = [
        (f"{directory}/{name}", data)
        for directory, files in arena.frozen.items()
        for name, data in files.items()
    ]
    chosen = chance.sample(known, min(4, len(known)))
    if chosen:
        paths = [str(arena.mounted.path / path) for path, _ in chosen]
        arena.mounted.cli("evict", *paths, check=False)
    for path, expected in chosen:
        try:
            found = (arena.mounted.path / path).read_bytes()
        except OSError as error:
            if error.errno not in READ_ERRORS:
                raise Failed(f"reading {path} failed with {error}") from error
            continue
        if found != expected:
            raise Failed(f"{path}: read {len(found)} bytes that are not its {len(expected)}")


def _expired_credentials(arena: Arena, chance: random.Random) -> None:
    arena.token += 1
    arena.server.required_token = f"token{arena.token}"
    arena.let_write(chance.randint(5, 30))
    arena.renew_credentials()


def _clock_skew(arena: Arena, chance: random.Random) -> None:
    arena.server.clock_ahead_s = chance.choice([-1200.0, 1200.0])
    arena.let_write(chance.randint(5, 30))
    arena.server.clock_ahead_s = 0.0


def _full_by_us(arena: Arena, chance: random.Random) -> None:
    """Nothing drains, and the writers go on until they are told so."""
    arena.server.stop()
    wait_until(
        lambda: any(errno.ENOSPC in writer.history().errors() for writer in arena.writers),
        "a writer that is refused",
        120,
    )
    arena.heal()


def _full_by_others(arena: Arena, chance: random.Random) -> None:
    hog = arena.disk / "hog"
    with open(hog, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    arena.mounted.expect_log("ENOSPC|No space left|namespace commit failed")
    arena.let_write(chance.randint(5, 20))
    hog.unlink()


def _power_cut(arena: Arena, chance: random.Random) -> None:
    kind = chance.random()
    if kind < 0.25:
        arena.server.stop()
        arena.let_write(chance.randint(3, 20))
    elif kind < 0.75:
        # When nobody changes names, the last commit is that of an upload, and no later one makes it durable.
        arena.stop_writers()
        time.sleep(chance.uniform(0.0, 0.5))
    arena.cut_power(chance.randrange(1 << 30))
    arena.heal()


def _second_node(arena: Arena, chance: random.Random) -> None:
    """Another node replaces an object while ours is being changed: both versions stay."""
    name = f"shared{chance.randrange(1 << 30)}"
    path, bucket = arena.mounted.path / name, arena.server.bucket
    path.write_bytes(b"first " * 1000)
    arena.mounted.flush(str(path))
    ours, theirs = b"ours " * 2000, b"theirs " * 3000
    replaced_first = chance.random() < 0.5
    if replaced_first:
        bucket.put(name, theirs)
    handle = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(handle, ours)
        os.fsync(handle)
        if not replaced_first:
            bucket.put(name, theirs)
    finally:
        os.close(handle)
    is_killed = chance.random() < 0.5
    if is_killed:
        arena.kill("engine")
        arena.start_again()
    # Not ``flush``: the writers go on, and there is always something left.
    wait_until(
        lambda: (
            any(key.startswith(f"{name}.conflict-") for key in arena.objects()) or name not in arena.objects()
        ),
        "the conflict in the store",
    )
    found = {key: data for key, data in arena.objects().items() if key.startswith(name)}
    kept = [key for key, data in found.items() if data == ours]
    if found.get(name) != theirs or len(kept) != 1 or ".conflict-" not in kept[0]:
        raise Failed(f"of two versions these were kept: { {key: data[:8] for key, data in found.items()} }")
    if (arena.mounted.path / kept[0]).read_bytes() != ours:
        raise Failed(f"{kept[0]} is not readable in the mount")
    if "another node wrote the same object" not in arena.mounted.log():
        raise Failed("the conflict was not logged")
    if not is_killed and not arena.mounted.status()["backlog"]["conflicts"]:
        raise Failed("the conflict is not in the status")


def _node_lost(arena: Arena, chance: random.Random) -> None:
    """The machine is gone with its disks: what the store was said to have, it has."""
    through = "--write-through" in arena.options
    if chance.random() < 0.5:
        arena.server.stop()
        arena.let_write(2)
    arena.kill("both")
    arena.heal()
    found = arena.objects()
    for writer in arena.writers:
        history = writer.history()
        for name, file in history.names().items():
            known = history.files[file]
            floor = known.closed_at if through else known.synced_at
            if floor < 0:
                continue
            data = found.get(f"{writer.directory.name}/{name}")
            wrong = "no object" if data is None else history.content_problem(file, data, floor=floor)
            if wrong:
                raise Failed(f"{writer.directory.name}/{name}: acknowledged as in the store: {wrong}")
    for writer in arena.writers:
        writer.kill()
    arena.writers.clear()
    arena.frozen.clear()
    for upload in list(arena.server.bucket.uploads):
        del arena.server.bucket.uploads[
            upload
        ]  # nobody knows of them any more but the bucket's life cycle rule
    for part in (arena.mounted.state_dir, arena.disk / "tier"):
        shutil.rmtree(part)
    arena.start_again()


STRIKES: dict[str, Strike] = {
    "kill engine": _kill("engine"),
    "kill front": _kill("front"),
    "kill both": _kill("both"),
    "kill applications": _kill_the_applications,
    "kill in an outage": _kill_in_an_outage,
    "outage": _outage,
    "503 storm": _storm("slow_down", "internal_error", probability=0.5),
    "short bodies": _storm("truncate", probability=0.5),
    "resets": _storm("reset", "lost_answer", probability=0.3),
    "hangs": _storm("hang", probability=0.2, seconds=1.0),
    "wrong ETag": _storm("wrong_etag", probability=0.5, operation="get"),
    "expired credentials": _expired_credentials,
    "clock skew": _clock_skew,
    "second node": _second_node,
    "disk full by us": _full_by_us,
    "disk full by others": _full_by_others,
    "power cut": _power_cut,
    "node lost": _node_lost,
}
"""By name. Those after ``second node`` need an arena of their own: see ``KINDS``."""

KINDS: dict[str, tuple[str, ...]] = {
    "small": ("disk full by us", "disk full by others"),
    "lossy": ("power cut",),
    "remote": ("node lost",),
}
"""Kind of arena -> strikes that need it. ``remote``: with ``--write-through`` or ``--fsync remote``."""
PLAIN = tuple(name for name in STRIKES if not any(name in names for names in KINDS.values()))
