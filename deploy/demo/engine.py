"""The mount as its command line shows it: ``tierfs status``, ``flush`` and ``evict``, all with ``--json``."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CommandFailed(Exception):
    """A tierfs command ended with a status other than 0. The message has what it said."""


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    capacity_bytes: int
    used_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class Status:
    front: str
    tiers: tuple[Tier, ...]
    store_url: str
    fetched_bytes: int
    """Body bytes that came from the store since the mount."""
    failures: tuple[str, ...]


class Engine:
    """Talks to the mount at ``mountpoint`` through the program ``tierfs``."""

    def __init__(self, tierfs: Path, mountpoint: Path) -> None:
        self._tierfs = tierfs
        self._mountpoint = mountpoint

    def status(self) -> Status:
        answer = self._run("status", self._mountpoint)
        return Status(
            front=answer["front"]["kind"],
            tiers=tuple(_tier(fields) for fields in answer["tiers"]),
            store_url=answer["store"]["url"],
            fetched_bytes=answer["store"]["bytes_read"],
            failures=tuple(f"{entry['path']}: {entry['message']}" for entry in answer["backlog"]["failed"]),
        )

    def flush(self, path: Path) -> None:
        """Returns when everything at or below ``path`` is in the store."""
        answer = self._run("flush", path)
        if answer["remaining_files"]:
            raise CommandFailed(f"flush: {answer['remaining_files']} files are not in the store")

    def evict(self, path: Path) -> None:
        """Drops all local copies at or below ``path``."""
        answer = self._run("evict", path)
        if answer["failed"]:
            raise CommandFailed(f"evict: {answer['failed'][0]['path']}: {answer['failed'][0]['message']}")

    def files_in_tiers(self, paths: Iterable[str]) -> Counter[str]:
        """Of how many of these files (relative to the mount) each tier holds something, by its name."""
        found: Counter[str] = Counter()
        for path in paths:
            tiers = json.loads(os.getxattr(self._mountpoint / path, "user.tierfs.tiers"))
            found.update(name for name, size_bytes in tiers.items() if size_bytes)
        return found

    def _run(self, command: str, path: Path) -> Any:
        done = subprocess.run(
            [self._tierfs, command, path, "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise CommandFailed(f"tierfs {command} {path}: exit status {done.returncode}: {said}")
        return json.loads(done.stdout)


def _tier(fields: dict[str, Any]) -> Tier:
    return Tier(
        name=fields["name"],
        capacity_bytes=fields["capacity_bytes"],
        used_bytes=fields["used_bytes"],
        hits=fields["hits"],
        misses=fields["misses"],
    )
