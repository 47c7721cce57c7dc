"""``python -m benchmarks.saves``: what saving large files again sends, and how fast what is saved drains.

On a SeaweedFS server of its own if the binary ``weed`` is found, else on a directory, or on ``--source``, in
three parts:

* *saves*: a file is saved, and saved again in several ways. Bytes sent and copied on the server, seconds of
  ``tierfs flush``, and processor time of the engine.
* *digests*: processor time for the digests of one GiB, in parts that are in memory.
* *drain*: files that wait for upload, drained by ``tierfs flush``, against uploaders without a mount that
  send as many: threads with boto3's ``upload_part``, and ``obstore``. Rounds alternate. The time that the
  command takes to start counts for the mount.

Writes some GiB below ``--work-dir`` and removes them again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.processes import cpu_seconds
from benchmarks.mounted import Mounted, MountFailed, fresh_mount
from benchmarks.quick import machine
from benchmarks.samples import Metric, table
from benchmarks.sources import Source, SourceFailed, open_source
from tierfs.writeback.part_index import PartIndex

MIB = 1024 * 1024
PART = 16 * MIB
MOUNT = "tierfs"
LATE = ("--upload-delay", "3600", "--part-size", str(PART))


@dataclass(frozen=True, slots=True)
class Save:
    """One line of the first part."""

    way: str
    file_mib: float
    sent_mib: float
    copied_mib: float
    seconds: float
    cpu_s: float


def saves(mounted: Mounted, size: int) -> Iterator[Save]:
    """Save a file of ``size`` bytes, a multiple of ten parts, again and again."""
    engine = int(mounted.status()["engine"]["pid"])
    body = bytearray(os.urandom(size))
    parts = size // PART
    place = mounted.mountpoint / "model"

    def flushed(way: str, path: Path) -> Save:
        before, cpu = mounted.status()["backlog"], cpu_seconds(engine)
        seconds = mounted.flush()
        after = mounted.status()["backlog"]
        sent, copied = (after[name] - before[name] for name in ("sent_bytes", "copied_bytes"))
        used = cpu_seconds(engine) - cpu
        return Save(way, path.stat().st_size / MIB, sent / MIB, copied / MIB, seconds, used)

    def change(count: int) -> None:
        for number in range(count):
            offset = number * parts // count * PART
            body[offset : offset + 8] = os.urandom(8)

    place.write_bytes(body)
    yield flushed("first time", place)
    change(parts // 10)
    place.with_suffix(".tmp").write_bytes(body)
    place.with_suffix(".tmp").rename(place)
    yield flushed("10 % of the parts changed, renamed over (tries out the store)", place)
    change(parts // 10)
    place.write_bytes(body)
    yield flushed("10 % of the parts changed, written anew", place)
    with place.open("r+b") as file:
        for number in range(parts // 10):
            offset = number * 10 * PART
            body[offset : offset + 8] = os.urandom(8)
            file.seek(offset)
            file.write(body[offset : offset + 8])
    yield flushed("10 % of the parts changed in place", place)
    with place.open("ab") as file:
        file.write(os.urandom(MIB))
    yield flushed("1 MiB appended", place)
    place.write_bytes(body)
    yield flushed("nothing changed, written anew", place)
    for step in (100, 200):
        path = mounted.mountpoint / f"step-{step}" / "model"
        path.parent.mkdir()
        change(parts // 10)
        path.write_bytes(body)
        yield flushed(f"step-{step}: another file, 10 % of the parts changed", path)


def digest_cpu_s(work_dir: Path, size: int) -> float:
    """Processor seconds per GiB."""
    bodies = [os.urandom(PART) for _ in range(4)]
    index = PartIndex.open(work_dir / "parts.lmdb")
    try:
        start = time.process_time()
        for number in range(size // PART):
            index.digest(bodies[number % len(bodies)])
        return (time.process_time() - start) / (size // PART * PART) * 1024**3
    finally:
        index.close()


class Uploaders:
    """Uploads without a mount, of files that are in the page cache, into the bucket of ``source``."""

    def __init__(self, source: Source) -> None:
        import boto3
        from botocore.config import Config

        self._bucket, _, prefix = source.url.removeprefix("s3://").partition("/")
        self._prefix = prefix + "/" if prefix else ""
        self._client = boto3.session.Session().client("s3", config=Config(max_pool_connections=64))

    def close(self) -> None:
        self._client.close()

    def boto3(self, paths: Sequence[Path], threads: int) -> None:
        """Every part is a task; so many threads do them."""
        place = {"Bucket": self._bucket}
        uploads = {path: self._client.create_multipart_upload(**place, Key=self._key(path))["UploadId"]
                   for path in paths}  # fmt: skip
        tasks = [(path, number) for path in paths for number in range(1, -(-path.stat().st_size // PART) + 1)]

        def send(task: tuple[Path, int]) -> dict[str, Any]:
            path, number = task
            with path.open("rb") as file:
                body = os.pread(file.fileno(), PART, (number - 1) * PART)
            answer = self._client.upload_part(
                **place, Key=self._key(path), UploadId=uploads[path], PartNumber=number, Body=body
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(send, tasks))
        for path in paths:
            parts = [part for task, part in zip(tasks, done, strict=True) if task[0] == path]
            self._client.complete_multipart_upload(
                **place, Key=self._key(path), UploadId=uploads[path], MultipartUpload={"Parts": parts}
            )

    def obstore(self, paths: Sequence[Path], threads: int) -> None:
        """So many requests at a time, shared by the files."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(self._bucket, client_options={"allow_http": True, "timeout": "120s"})
        each = max(1, threads // len(paths))

        def send(path: Path) -> None:
            obstore.put(
                store, self._key(path), path, use_multipart=True, chunk_size=PART, max_concurrency=each
            )

        with ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(send, paths))

    def _key(self, path: Path) -> str:
        return f"{self._prefix}raw/{path.name}"


def drain(
    source: Source, mounted: Mounted, work_dir: Path, files: int, size: int, rounds: int
) -> list[Metric]:
    """MiB/s of each; the mount's files are new in every round, so that nothing of them is in the store."""
    rate = Metric("drain", "MiB/s")
    cpu = Metric("processor time", "s/GiB", higher_is_better=False)
    uploaders = Uploaders(source)
    ways: dict[str, Callable[[Sequence[Path]], None]] = {
        f"boto3, {threads} threads": lambda paths, n=threads: uploaders.boto3(paths, n)  # type: ignore[misc]
        for threads in (4, 8, 16)
    }
    ways["obstore, 16 requests"] = lambda paths: uploaders.obstore(paths, 16)
    engine = int(mounted.status()["engine"]["pid"])
    amount = files * size / MIB
    try:
        for _ in range(rounds):
            with _files(mounted.mountpoint, files, size):
                start = cpu_seconds(engine)
                rate.add(MOUNT, amount / mounted.flush())
                cpu.add(MOUNT, (cpu_seconds(engine) - start) / amount * 1024)
            for name, send in ways.items():
                with _files(work_dir / "raw", files, size) as paths:
                    begin, start = time.monotonic(), time.process_time()
                    send(paths)
                    rate.add(name, amount / (time.monotonic() - begin))
                    cpu.add(name, (time.process_time() - start) / amount * 1024)
    finally:
        uploaders.close()
    return [rate, cpu]


@contextmanager
def _files(directory: Path, count: int, size: int) -> Iterator[list[Path]]:
    directory.mkdir(exist_ok=True)
    paths = [directory / f"shard-{number}" for number in range(count)]
    for path in paths:
        with path.open("wb") as file:
            for _ in range(size // PART):
                file.write(os.urandom(PART))
            os.fsync(file.fileno())
    try:
        yield paths
    finally:
        for path in paths:
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--source", help="s3://bucket/prefix or a directory; default: a server of its own")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size-mib", type=int, default=480, help="of the file that is saved again")
    parser.add_argument("--drain-files", type=int, default=4)
    parser.add_argument("--drain-mib", type=int, default=128, help="of each of them")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory(prefix="tierfs-saves-", dir=given.work_dir) as name:
        work_dir = Path(name)
        try:
            with open_source(given.source, work_dir) as source:
                print(f"machine   {about['processor']}, {about['cores']} cores, Linux {about['kernel']}, "
                      f"load before {about['load']:.2f}")  # fmt: skip
                print(f"store     {source.description}\ncommand   {shlex.join(sys.orig_argv)}\n")
                size = max(1, given.size_mib * MIB // (10 * PART)) * 10 * PART
                with fresh_mount(
                    source.url, work_dir / "mnt", work_dir, tier_bytes=8 << 30, options=LATE
                ) as mounted:
                    for save in saves(mounted, size):
                        print(f"{save.way:62} {save.file_mib:6.0f} MiB: sent {save.sent_mib:6.1f}, copied "
                              f"{save.copied_mib:6.1f}, {save.seconds:5.1f} s, engine "
                              f"{save.cpu_s:5.2f} CPU s",
                              flush=True)  # fmt: skip
                    print(f"\ndigests: {digest_cpu_s(work_dir, 4 << 30):.3f} CPU s per GiB\n")
                    if source.url.startswith("s3://") and given.rounds:
                        metrics = drain(
                            source, mounted, work_dir, given.drain_files, given.drain_mib * MIB, given.rounds
                        )
                        print(table(metrics, MOUNT, [each for each in metrics[0].values if each != MOUNT]))
        except (SourceFailed, MountFailed) as error:
            print(f"benchmarks.saves: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
