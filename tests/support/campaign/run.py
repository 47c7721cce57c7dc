"""A campaign of so many strikes: the program behind ``make faults``.

::

    python -m tests.support.campaign.run --strikes 200 --seed 7 [--only "power cut"] [--front native]

Prints a line per strike, with the seed of its episode, and at the end what was found. An episode is one arena with
several strikes in a row; one that fails is given up, and its directory kept. The exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.campaign.arena import Arena
from tests.support.campaign.strikes import KINDS, PLAIN, STRIKES
from tests.support.mount import fuse_missing, native_missing, remove_tree

STRIKES_PER_EPISODE = 6
WRITERS = 2
KEPT_DIRECTORIES = 4


@dataclass(frozen=True, slots=True)
class Episode:
    """One arena, and what strikes there. All of it follows from ``seed``."""

    seed: int
    kind: str
    front: str
    options: tuple[str, ...]
    profile: str
    strikes: tuple[str, ...]


def draw(
    seed: int, fronts: Sequence[str], only: str | None = None, count: int = STRIKES_PER_EPISODE
) -> Episode:
    """The episode of that seed."""
    chance = random.Random(seed)
    kind = chance.choices(["plain", *KINDS], weights=[5, 1, 3, 1])[0]
    names = PLAIN if kind == "plain" else KINDS[kind]
    if only is not None:
        kind = next((kind for kind, names in KINDS.items() if only in names), "plain")
        names = (only,)
    strikes = tuple(chance.choice(names) for _ in range(count))
    options: tuple[str, ...] = ("--upload-delay", chance.choice(["0", "0.1", "1"]))
    profile = chance.choice(["names", "names large"])
    if kind == "small":
        profile = "names fill"
    elif kind == "remote":
        profile = "plain"
        options = (*options, *chance.choice([("--write-through",), ("--fsync", "remote")]))
    return Episode(seed, kind, chance.choice(list(fronts)), options, profile, strikes)


def strike_once(
    arena: Arena, name: str, chance: random.Random, *, calls: int = 40
) -> tuple[int, Counter[int]]:
    """One strike with writers around it, and every check; how many calls were acknowledged, and failed by errno.

    Raises ``AssertionError``.
    """
    arena.start_writers(WRITERS, chance.randrange(1 << 20))
    writers = list(arena.writers)
    arena.let_write(chance.randint(2, calls))
    STRIKES[name](arena, chance)
    arena.stop_writers()
    arena.heal()
    arena.start_again()
    histories = [writer.history() for writer in writers]
    arena.check_here(power_cut=name == "power cut")
    arena.check_store(patiently="outage" in name)
    arena.remove_old(KEPT_DIRECTORIES)
    errors: Counter[int] = Counter()
    for history in histories:
        errors.update(history.errors())
    return sum(history.acknowledged for history in histories), errors


def run_episode(episode: Episode, base: Path) -> Iterator[str]:
    """A line for each strike. Raises ``AssertionError``."""
    chance = random.Random(episode.seed + 1)
    kind = "plain" if episode.kind == "remote" else episode.kind
    with Arena(
        base, kind=kind, front=episode.front, options=episode.options, profile=episode.profile
    ) as arena:
        for name in episode.strikes:
            start = time.monotonic()
            yield f"{name:20}"
            acknowledged, errors = strike_once(arena, name, chance)
            arena.mounted.check_log()
            yield f" {acknowledged:4} calls, errors {dict(errors)}, {time.monotonic() - start:.1f} s\n"


def _log_tail(base: Path, lines: int = 40) -> str:
    log = base / "m" / "log"
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:]) if log.exists() else "no log"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.support.campaign.run", description="Strikes at a mount.")
    parser.add_argument("--strikes", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the campaign; without, a new one, which is printed"
    )
    parser.add_argument("--only", choices=list(STRIKES), default=None)
    parser.add_argument("--front", choices=["native", "python"], default=None)
    chosen = parser.parse_args(arguments)
    if missing := fuse_missing():
        print(f"no FUSE here: {missing}")
        return 2
    fronts = [chosen.front] if chosen.front else ["python"] if native_missing() else ["native", "python"]
    seed = random.SystemRandom().randrange(1_000_000) if chosen.seed is None else chosen.seed
    print(f"campaign of {chosen.strikes} strikes, seed {seed}", flush=True)
    done, failed, number = 0, 0, 0
    while done < chosen.strikes:
        count = min(STRIKES_PER_EPISODE, chosen.strikes - done)
        episode = draw(seed * 1000 + number, fronts, chosen.only, count)
        number += 1
        print(f"-- {episode}", flush=True)
        base = Path(tempfile.mkdtemp(prefix="tierfs-faults-"))
        base.chmod(0o755)
        try:
            for text in run_episode(episode, base):
                print(text, end="", flush=True)
                done += text.endswith("\n")
        except Exception as error:
            failed += 1
            done += 1
            print(f"\nFAILED: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(file=sys.stdout)
            print(_log_tail(base), f"kept: {base}", sep="\n", flush=True)
            continue
        remove_tree(base)
    print(f"{done} strikes in {number} episodes, seed {seed}: {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
