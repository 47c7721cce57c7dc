"""``python -m benchmarks.frameworks --interpreter PYTHON``: see :mod:`benchmarks.frameworks`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mounted import Mounted, MountFailed, fresh_mount
from benchmarks.training.driver import LoadFailed, last_words, parse, versions
from tierfs.cli.native import why_not

LOOPS = Path(__file__).parent / "loops"
LIMIT_S = 600.0
TIER_BYTES = 1 << 30
PHASES = ((14, "begin"), (26, "resume"))
"""Checkpoints at 4, 8, 12 (and 14), interrupted there; then at 16, 20, 24 (and 26)."""


class Wrong(Exception):
    """The framework found something else than on a local disk; the message says what."""


@dataclass(frozen=True, slots=True)
class Framework:
    """``shown``: what it should leave of its checkpoints after so many steps, by name in its directory."""

    name: str
    script: str
    packages: tuple[str, ...]
    shown: Callable[[list[str]], set[str]]


def _lightning(names: list[str]) -> set[str]:
    return {name for name in names if name.endswith(".ckpt")}


def _transformers(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("checkpoint-")}


FRAMEWORKS = (
    Framework("lightning", "lightning_loop.py", ("lightning", "torch"), _lightning),
    Framework("transformers", "transformers_loop.py", ("transformers", "accelerate", "torch"), _transformers),
)


def train(
    interpreter: Path, framework: Framework, directory: Path, steps: int, verb: str
) -> dict[str, dict[str, str] | str]:
    """One run of a script; its notes. Raises LoadFailed."""
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    command = [str(interpreter), str(LOOPS / framework.script), str(directory), str(steps), verb]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment, timeout=LIMIT_S, check=False, cwd="/",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"no end within {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise LoadFailed(f"exit code {done.returncode}: {last_words(done.stdout)}")
    found: dict[str, dict[str, str] | str] = parse(done.stdout)  # type: ignore[assignment]
    return found


def tree(directory: Path) -> dict[str, bytes | str]:
    """Every file and link below, but for what begins with a dot."""
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if name.startswith("."):
            continue
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def check(interpreter: Path, framework: Framework, front: str, work_dir: Path) -> int:
    """Train, lose all that is local, go on. Returns the bytes that were kept. Raises Wrong and others."""
    plain, store = work_dir / "plain", work_dir / "store"
    for directory in (plain, store):
        directory.mkdir()
    wanted = [train(interpreter, framework, plain, *phase) for phase in PHASES]
    kept = framework.shown(os.listdir(plain))
    with fresh_mount(
        str(store), work_dir / "mnt", work_dir, tier_bytes=TIER_BYTES, options=("--front", front)
    ) as mounted:
        directory = mounted.mountpoint / "run"
        first = train(interpreter, framework, directory, *PHASES[0])
        expect(mounted, framework, directory, store / "run")
        throw_away(mounted, directory)
        second = train(interpreter, framework, directory, *PHASES[1])
        expect(mounted, framework, directory, store / "run")
        if (found := framework.shown(os.listdir(directory))) != kept:
            raise Wrong(f"left {sorted(found)}, in a plain directory {sorted(kept)}")
        restored, saved = second["restored"], first["saved"]
        assert isinstance(restored, dict)
        assert isinstance(saved, dict)
        if not restored or any(saved.get(step) != state for step, state in restored.items()):
            raise Wrong(f"restored {restored}, saved {saved}")
        if [first, second] != wanted:
            raise Wrong(f"it went on in another way than in a plain directory: {[first, second]}, {wanted}")
        return sum(len(content) for content in tree(directory).values())


def expect(mounted: Mounted, framework: Framework, directory: Path, objects: Path) -> None:
    """Two checkpoints are left (and the link, or the last one of all), and the store has just these bytes."""
    names = framework.shown(os.listdir(directory))
    if not 2 <= len(names) <= 3:
        raise Wrong(f"of the checkpoints there are {sorted(names)}")
    mounted.flush()
    here = {name: data for name, data in tree(directory).items() if isinstance(data, bytes)}
    there = tree(objects)
    links = {name for name, data in tree(directory).items() if isinstance(data, str)}
    if here != {name: data for name, data in there.items() if name not in links}:
        differing = {name for name in here.keys() | there.keys() - links if here.get(name) != there.get(name)}
        raise Wrong(f"store and mount differ in {sorted(differing)}")


def throw_away(mounted: Mounted, directory: Path) -> None:
    """Nothing of the checkpoints stays in the tiers or in the page cache."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    deadline = time.monotonic() + 60.0
    while True:
        mounted.command("evict", str(directory))
        left = [
            str(path)
            for path in directory.rglob("*")
            if path.is_file() and not path.is_symlink() and path.stat().st_size
            if os.getxattr(path, "user.tierfs.resident") not in (b"0", b"")
        ]
        if not left:
            return
        if time.monotonic() > deadline:
            raise Wrong(f"still local after evict: {left}")
        time.sleep(0.2)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [framework.name for framework in FRAMEWORKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks", description=__doc__)
    parser.add_argument("--interpreter", type=Path, required=True, help="a Python with the frameworks")
    parser.add_argument("--framework", choices=names, action="append", help="only this one (may be repeated)")
    parser.add_argument("--front", choices=("native", "python"), action="append", help="only this one")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to stop, it still cleans up
    fronts = options.front or (["python"] if why_not() else ["native", "python"])
    wanted = [each for each in FRAMEWORKS if not options.framework or each.name in options.framework]
    failed = 0
    for framework in wanted:
        found = versions(options.interpreter, list(framework.packages))
        for front in fronts:
            began = time.monotonic()
            work_dir = Path(tempfile.mkdtemp(prefix="tierfs-frameworks-"))
            try:
                size_bytes = check(options.interpreter, framework, front, work_dir)
                said = f"ok, {size_bytes / 1e6:.1f} MB kept"
            except (Wrong, LoadFailed, MountFailed) as error:
                failed += 1
                said = f"FAILED: {error}"
            finally:
                shutil.rmtree(work_dir, ignore_errors=True)
            print(
                f"{framework.name} {json.dumps(found)}, front {front}: {said} "
                f"({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
