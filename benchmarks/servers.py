"""Servers for benchmarks, on free loopback ports: SeaweedFS or MinIO as the S3 store, Redis for metadata.

Each is started with its data below a directory that its caller owns, and with an environment that its
caller may add to (by which its processes are found again). ``ServerFailed`` says what it printed if it does
not come up.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ACCESS_KEY = SECRET_KEY = "tierfsbench"
REGION = "us-east-1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 5.0
VACUUM_LIMIT_S = 120.0
POLL_S = 0.05
GRPC_OFFSET = 10000


class ServerFailed(Exception):
    """A server did not start; the message ends with what it printed."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """``filer``: HTTP and gRPC port of SeaweedFS's filer, which its own client talks to; None for other
    servers. ``vacuum_url``: where SeaweedFS is asked to free the space of what was deleted, which it does
    by itself only every quarter of an hour; None for servers that do at once. ``pid``: of the process, while
    it runs.
    """

    name: str
    endpoint_url: str
    command: tuple[str, ...]
    filer: tuple[int, int] | None = None
    vacuum_url: str | None = None
    pid: int = 0

    @property
    def port(self) -> int:
        return int(self.endpoint_url.rpartition(":")[2])

    def free_space(self) -> None:
        """Free the space of what was deleted; returns when that is done. Raises OSError."""
        if self.vacuum_url is not None:
            with urllib.request.urlopen(self.vacuum_url, timeout=VACUUM_LIMIT_S) as answer:
                answer.read()


def credentials(endpoint_url: str) -> dict[str, str]:
    """Environment for everything that looks for S3 credentials as the AWS tools do."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint_url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def find_binary(name: str, beside: Sequence[Path] = ()) -> str | None:
    """Where a program is, absolute: in one of these places, beside this interpreter, on the PATH."""
    for directory in (*beside, Path(sys.executable).parent):
        candidate = (directory / name).absolute()  # it is started in other directories
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return str(candidate)
    return shutil.which(name)


@contextlib.contextmanager
def seaweedfs(
    binary: str, directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[S3Server]:
    """A SeaweedFS server. Raises ServerFailed."""
    data = directory / "data"
    data.mkdir(parents=True)
    identity = {
        "name": "benchmark",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    parts = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(parts))
    http = dict(zip(parts, ports, strict=False))
    grpc = dict(zip(parts, ports[len(parts) :], strict=True))
    command = (
        binary, f"-logdir={directory}", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=128", "-master.electionTimeout=1s",
        "-volume.max=0", "-volume.minFreeSpace=1GiB", "-volume.preStopSeconds=0", "-filer", "-s3",
        f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{part}.port={http[part]}" for part in parts),
        *(f"-{part}.port.grpc={grpc[part]}" for part in parts),
    )  # fmt: skip
    server = S3Server(
        "SeaweedFS",
        f"http://127.0.0.1:{http['s3']}",
        command,
        filer=(http["filer"], grpc["filer"]),
        vacuum_url=f"http://127.0.0.1:{http['master']}/vol/vacuum?garbageThreshold=0.1",
    )
    with _running(command, directory, environment, lambda: _store_answers(server.endpoint_url)) as pid:
        yield replace(server, pid=pid)


@contextlib.contextmanager
def minio(binary: str, directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[S3Server]:
    """A MinIO server. Raises ServerFailed."""
    data = directory / "data"
    data.mkdir(parents=True)
    api, console = free_ports(2)
    command = (
        binary, "server", "--quiet", "--address", f"127.0.0.1:{api}",
        "--console-address", f"127.0.0.1:{console}", str(data),
    )  # fmt: skip
    server = S3Server("MinIO", f"http://127.0.0.1:{api}", command)
    own = {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY, "MINIO_BROWSER": "off"}
    with _running(
        command, directory, {**own, **(environment or {})}, lambda: _store_answers(server.endpoint_url)
    ) as pid:
        yield replace(server, pid=pid)


@contextlib.contextmanager
def redis(binary: str, directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A Redis server that appends to its log every second, as JuiceFS recommends; gives its URL."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    command = (
        binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "",
        "--appendonly", "yes", "--appendfsync", "everysec", "--daemonize", "no",
    )  # fmt: skip
    with _running(command, directory, environment, lambda: _redis_answers(port)):
        yield f"redis://127.0.0.1:{port}/1"


def make_bucket(endpoint_url: str, name: str, body: bytes | None = None) -> None:
    """Make a bucket in a server of ours; with ``body`` write an object too: some make room on demand only."""
    s3 = s3_client(endpoint_url)
    try:
        with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou, s3.exceptions.BucketAlreadyExists):
            s3.create_bucket(Bucket=name)
        if body is not None:
            s3.put_object(Bucket=name, Key="ready", Body=body)
    finally:
        s3.close()


def s3_client(endpoint_url: str) -> Any:
    """A boto3 client of a server of ours; one try per request."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3", endpoint_url=endpoint_url, region_name=REGION, aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY, config=Config(retries={"total_max_attempts": 1},
        connect_timeout=1, read_timeout=10, s3={"addressing_style": "path"}),
    )  # fmt: skip


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on. They are not reserved."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            found = stack.enter_context(socket.socket())
            found.bind(("127.0.0.1", 0))
            ports.append(int(found.getsockname()[1]))
        return ports


def free_pair() -> tuple[int, int]:
    """Two such ports, the second ``GRPC_OFFSET`` above the first: where SeaweedFS looks if it is not told."""
    for _ in range(100):
        (port,) = free_ports(1)
        low = port - GRPC_OFFSET if port > 2 * GRPC_OFFSET else port
        try:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("127.0.0.1", low))
                second.bind(("127.0.0.1", low + GRPC_OFFSET))
        except OSError:
            continue
        return low, low + GRPC_OFFSET
    raise ServerFailed(f"no two free ports {GRPC_OFFSET} apart")


def _store_answers(endpoint_url: str) -> bool:
    """A first object can be written."""
    try:
        make_bucket(endpoint_url, "ready", b"x")
    except Exception:
        return False
    return True


def _redis_answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@contextlib.contextmanager
def _running(
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str] | None,
    answers: Callable[[], bool],
) -> Iterator[int]:
    """Gives its process id once it answers."""
    log = directory / "output"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, **(environment or {})},
            )  # fmt: skip
        except OSError as error:
            raise ServerFailed(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        limit = time.monotonic() + START_LIMIT_S
        while not answers():
            if process.poll() is not None or time.monotonic() > limit:
                said = log.read_text(errors="replace")[-2000:]
                raise ServerFailed(f"{Path(command[0]).name} did not start:\n{said}")
            time.sleep(POLL_S)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
