"""The checks of ``tierfs doctor``: each looks at one thing and says what to do about it."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tierfs.errors import ConfigError, StoreAccessDenied, TierfsError

if TYPE_CHECKING:
    from tierfs.config import Settings

Level = Literal["ok", "note", "warns", "blocks"]
PASSTHROUGH_SINCE = (6, 9)
IO_URING_SINCE = (6, 14)
MAX_SKEW_S = 60.0
"""S3 refuses requests that are 15 minutes off; a minute already makes times in listings look wrong."""
TEST_BYTES = 64 * 1024 * 1024
SLOW_WRITE_BYTES_PER_S = 100 * 1024 * 1024
SLOW_SYNC_S = 0.02
LOW_FREE_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Result:
    """``blocks``: no mount is possible; ``warns``: it works worse than it could."""

    name: str
    level: Level
    found: str
    advice: str = ""


def run(given: dict[str, object], config_file: str | None) -> Iterator[Result]:
    """All checks, one after the other; those of the store only if a source is known."""
    for check in (
        fuse_device,
        fuse_helper,
        kernel,
        native_front,
        passthrough,
        io_uring,
        privileges,
        user_allow_other,
    ):
        yield _guarded(check.__name__.replace("_", " "), check)
    try:
        settings = _settings(given, config_file)
    except ConfigError as error:
        yield Result("settings", "blocks", str(error), "correct the setting that is named")
        return
    yield _guarded("free space", lambda: free_space(settings))
    yield _guarded("disk speed", lambda: disk_speed(settings))
    if not settings.source:
        yield Result("bucket", "note", "not checked", "name it: tierfs doctor s3://bucket")
        return
    if settings.source.startswith("s3://"):
        yield _guarded("credentials", lambda: credentials(settings))
        yield _guarded("clock", lambda: clock(settings))
    result = _guarded("bucket", lambda: bucket(settings))
    yield result
    if result.level == "ok" and not settings.read_only:
        yield _guarded("part copy", lambda: part_copy(settings))


def _guarded(name: str, check: Callable[[], Result]) -> Result:
    try:
        return check()
    except Exception as error:
        return Result(name, "warns", f"could not be checked: {type(error).__name__}: {error}")


def _settings(given: dict[str, object], config_file: str | None) -> Settings:
    """Settings as a mount would see them; without a source everything but the store can be checked."""
    import msgspec

    from tierfs.config import load

    placeholders: dict[str, object] = {}
    without_source = False
    while True:
        try:
            settings = load(given | placeholders, config_file=config_file)
        except ConfigError as error:
            text = str(error)
            if text.startswith("mountpoint: not given") and "mountpoint" not in placeholders:
                placeholders["mountpoint"] = "/nonexistent/tierfs"
            elif text.startswith("source: not given") and not without_source:
                placeholders["source"], without_source = "s3://unknown", True
            else:
                raise
        else:
            return msgspec.structs.replace(settings, source="") if without_source else settings


def _kernel_version() -> tuple[int, int]:
    major, minor, *_ = platform.release().split(".")
    return int(major), int("".join(char for char in minor if char.isdigit()) or 0)


def fuse_device() -> Result:
    name = "FUSE device"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return Result(
            name,
            "blocks",
            "/dev/fuse does not exist",
            "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN",
        )
    except OSError as error:
        return Result(
            name,
            "blocks",
            f"/dev/fuse cannot be opened: {error.strerror}",
            "its mode is normally 0666; in a container: --device /dev/fuse",
        )
    return Result(name, "ok", "/dev/fuse can be opened")


def fuse_helper() -> Result:
    name = "fusermount3"
    helper = shutil.which("fusermount3")
    if helper is None:
        level: Level = "note" if os.geteuid() == 0 else "blocks"
        return Result(
            name, level, "not found", "apt-get install fuse3; users other than root need it to mount"
        )
    if os.geteuid() != 0 and not os.stat(helper).st_mode & 0o4000:
        return Result(name, "blocks", f"{helper} is not setuid root", "reinstall the package fuse3")
    return Result(name, "ok", helper)


def kernel() -> Result:
    release = platform.release()
    if _kernel_version() < (5, 4):
        return Result("kernel", "warns", release, "tierfs is tested on Linux 5.15 and newer")
    return Result("kernel", "ok", release)


def _is_admin() -> bool:
    """Whether this process has CAP_SYS_ADMIN (bit 21 of the capability sets, capabilities(7))."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1]
    return bool(int(effective, 16) >> 21 & 1)


def native_front() -> Result:
    import subprocess

    import tierfs_native

    name = "native front"
    path = tierfs_native.front_path()
    if path is None:
        return Result(
            name,
            "note",
            f"not built: {tierfs_native.why_missing()}",
            "every request goes through Python; provide what is missing, then install tierfs again",
        )
    # The dynamic loader exits with 127 if a library is gone; the rest is the program's own answer.
    tried = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    if tried.returncode == 127:
        return Result(
            name,
            "warns",
            f"{path} does not start: {tried.stderr.strip()}",
            "apt-get install liblmdb0, or install tierfs again",
        )
    return Result(name, "ok", str(path))


def passthrough() -> Result:
    import tierfs_native

    name, needed = "passthrough", ".".join(map(str, PASSTHROUGH_SINCE))
    if _kernel_version() < PASSTHROUGH_SINCE:
        return Result(
            name,
            "note",
            f"needs Linux {needed}",
            "reads of local files are copied by a process; a newer kernel is faster",
        )
    if not _is_admin():
        return Result(name, "note", "offered by the kernel to CAP_SYS_ADMIN only", "mount as root to use it")
    if tierfs_native.front_path() is None:
        return Result(name, "note", "offered by the kernel; only the native front uses it")
    return Result(name, "ok", "offered by the kernel")


def io_uring() -> Result:
    name = "io_uring"
    if _kernel_version() < IO_URING_SINCE:
        return Result(name, "note", f"FUSE over io_uring needs Linux {'.'.join(map(str, IO_URING_SINCE))}")
    parameter = Path("/sys/module/fuse/parameters/enable_uring")
    try:
        value = parameter.read_text().strip()
    except OSError:
        return Result(name, "note", "FUSE over io_uring is not built into this kernel")
    if value not in {"Y", "1"}:
        found = f"FUSE over io_uring is off (enable_uring is {value}); only --fuse-uring on needs it"
        return Result(name, "note", found)
    found = f"FUSE over io_uring is offered (enable_uring is {value}); --fuse-uring on uses it"
    return Result(name, "ok", found)


def privileges() -> Result:
    name = "permissions"
    if os.geteuid() != 0:
        return Result(name, "ok", f"user {os.geteuid()}; mounts through fusermount3, for itself only")
    if not _is_admin():
        return Result(
            name,
            "blocks",
            "root without CAP_SYS_ADMIN",
            "start the container with --cap-add SYS_ADMIN --device /dev/fuse (and, with AppArmor, "
            "--security-opt apparmor=unconfined)",
        )
    return Result(name, "ok", "root with CAP_SYS_ADMIN; mounts are visible to all users")


def user_allow_other() -> Result:
    name = "allow_other"
    if os.geteuid() == 0:
        return Result(name, "ok", "root may always use it")
    try:
        lines = Path("/etc/fuse.conf").read_text().splitlines()
    except OSError:
        lines = []
    if any(line.strip() == "user_allow_other" for line in lines):
        return Result(name, "ok", "user_allow_other is set in /etc/fuse.conf")
    return Result(
        name,
        "note",
        "only root may let other users in",
        "add the line user_allow_other to /etc/fuse.conf to use --allow-other",
    )


def _existing(path: str) -> str:
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def free_space(settings: Settings) -> Result:
    from tierfs.cli.output import size

    found: list[str] = []
    level: Level = "ok"
    for path in dict.fromkeys([settings.state_dir, *(tier.path for tier in settings.tiers if tier.path)]):
        info = os.statvfs(_existing(path))
        free_bytes = info.f_bavail * info.f_frsize
        found.append(f"{size(free_bytes)} at {path}")
        if free_bytes < LOW_FREE_BYTES:
            level = "warns"
    advice = "free some, or name another directory (--state-dir, --tier)" if level != "ok" else ""
    return Result("free space", level, "; ".join(found), advice)


def disk_speed(settings: Settings) -> Result:
    """Write speed and the time of an fsync where the state would be: the namespace commits there."""
    from tierfs.cli.output import size

    directory = _existing(settings.state_dir)
    if not os.access(directory, os.W_OK):
        return Result(
            "state dir",
            "blocks",
            f"{directory} cannot be written",
            "name a directory of your own with --state-dir",
        )
    block = os.urandom(1024 * 1024)
    with tempfile.TemporaryFile(dir=directory, prefix=".tierfs-doctor-") as file:
        start = time.monotonic()
        for _ in range(TEST_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = TEST_BYTES / (time.monotonic() - start)
        syncs = []
        for _ in range(5):
            start = time.monotonic()
            os.pwrite(file.fileno(), block[:4096], 0)
            os.fsync(file.fileno())
            syncs.append(time.monotonic() - start)
    sync_s = sorted(syncs)[len(syncs) // 2]
    found = f"{size(rate)}/s written, fsync {sync_s * 1000:.1f} ms at {directory}"
    if rate < SLOW_WRITE_BYTES_PER_S or sync_s > SLOW_SYNC_S:
        return Result("disk speed", "warns", found, "put --state-dir and --tier on a local NVMe disk")
    return Result("disk speed", "ok", found)


def credentials(settings: Settings) -> Result:
    from tierfs.store.s3_credentials import describe_credentials

    name, advice = "credentials", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or --profile"
    try:
        found = describe_credentials(settings)
    except ConfigError as error:
        return Result(name, "blocks", str(error), advice)
    if found is None:
        return Result(name, "warns", "none found: requests are not signed", advice)
    return Result(name, "ok", found)


def clock(settings: Settings) -> Result:
    """Compare this clock with the Date of whatever answer the store's endpoint gives."""
    import urllib.error
    import urllib.request

    endpoint = settings.endpoint_url or f"https://s3.{settings.region or 'us-east-1'}.amazonaws.com"
    request = urllib.request.Request(endpoint, method="HEAD")
    before = time.time()
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        date = error.headers.get("Date")
        error.close()
    except OSError as error:
        return Result(
            "clock", "warns", f"{endpoint} does not answer: {error}", "check the address and the network"
        )
    if not date:
        return Result("clock", "note", f"{endpoint} does not tell the time")
    skew_s = (before + time.time()) / 2 - parsedate_to_datetime(date).timestamp()
    if abs(skew_s) > MAX_SKEW_S:
        return Result("clock", "warns", f"{skew_s:+.0f} s off the store's clock", "timedatectl set-ntp true")
    return Result("clock", "ok", "agrees with the store's")


def bucket(settings: Settings) -> Result:
    from msgspec.structs import replace

    from tierfs.store.open import open_store

    logging.getLogger().addHandler(logging.NullHandler())  # the result says it all
    try:
        store, _prefix = open_store(replace(settings, store_timeout_s=min(settings.store_timeout_s, 10.0)))
        try:
            start = time.monotonic()
            store.check()
            took_s = time.monotonic() - start
        finally:
            store.close()
    except TierfsError as error:
        return Result(
            "bucket", "blocks", str(error), "compare with what 'aws s3 ls' says for the same bucket"
        )
    return Result("bucket", "ok", f"{settings.source} can be listed ({took_s * 1000:.0f} ms)")


def part_copy(settings: Settings) -> Result:
    """Whether what has not changed in a large file need not be sent again.

    Writes two objects to a bucket, and removes them.
    """
    from msgspec.structs import replace

    from tierfs.store.open import open_store
    from tierfs.store.part_copy import why_no_part_copy

    name, fine = "part copy", "of a large file that was changed in part only the changed parts are sent"
    if not settings.source.startswith("s3://"):
        return Result(name, "ok", fine)
    store, prefix = open_store(replace(settings, store_timeout_s=min(settings.store_timeout_s, 10.0)))
    try:
        reason = why_no_part_copy(store, f"{prefix}.tierfs/probe-{secrets.token_hex(8)}")
    except StoreAccessDenied as error:
        return Result(name, "note", f"not tried, nothing may be written here: {error}")
    finally:
        store.close()
    if reason is not None:
        return Result(
            name,
            "note",
            reason,
            "a large file that was changed in part is sent whole; nothing else is affected",
        )
    return Result(name, "ok", fine)
