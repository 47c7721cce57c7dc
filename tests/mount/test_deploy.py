"""What deploy/ holds, as far as it can be tried without a running systemd: its command lines, and fstab."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, mount_entry, tierfs_command, wait_until
from tierfs.config import load
from tierfs.config.fstab import parse

DEPLOY = Path(__file__).parents[2] / "deploy"


def unit() -> dict[str, list[str]]:
    """The directives of the template unit, by name."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "tierfs@.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


class Service:
    """Plays systemd for one instance: runs the unit's commands in its order, as it says about failures."""

    def __init__(self, mounted: Mounted, config: Path) -> None:
        self._mounted = mounted
        self._config = config
        self.process: subprocess.Popen[bytes] | None = None

    def _command(self, text: str) -> list[str]:
        words = shlex.split(text.lstrip("-").replace("/etc/tierfs/%i.toml", str(self._config)))
        assert words[0] == "/usr/local/bin/tierfs"
        return [*tierfs_command(), *words[1:]]

    def _run(self, directive: str) -> None:
        for text in unit()[directive]:
            done = subprocess.run(
                self._command(text), env=self._mounted.process_environment(), capture_output=True, check=False
            )
            assert text.startswith("-") or done.returncode == 0, done.stderr

    def start(self) -> None:
        self._run("ExecStartPre")
        (command,) = unit()["ExecStart"]
        with open(self._mounted.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self._command(command),
                env=self._mounted.process_environment(),
                stdout=log,
                stderr=log,
                cwd="/",
            )
        wait_until(self._mounted.is_up, "mount")

    def ended(self) -> int:
        assert self.process is not None
        code = self.process.wait(60)
        self._run("ExecStopPost")
        self.process = None
        return code


@pytest.fixture
def service(mount_factory: MountFactory, base_dir: Path) -> Iterator[Service]:
    mounted = mount_factory.prepare()
    config = base_dir / "data.toml"
    config.write_text(
        f'source = "{mounted.source}"\nmountpoint = "{mounted.path}"\nstate_dir = "{mounted.state_dir}"\n'
        f'tier = ["{mounted.base / "tier"}:1G"]\nfront = "python"\n'
    )
    found = Service(mounted, config)
    yield found
    if found.process is not None:
        found.process.terminate()
        found.ended()


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.needs_fuse
def test_the_unit_heals_a_mount_whose_engine_was_killed(service: Service, base_dir: Path) -> None:
    mountpoint = service._mounted.path
    service.start()
    (mountpoint / "f").write_bytes(b"1")
    assert service.process is not None
    service.process.kill()
    assert service.ended() != 0
    assert mount_entry(mountpoint) is None  # ExecStopPost has cleared the dead mount away
    service.start()
    assert (mountpoint / "f").read_bytes() == b"1"
    service.process.terminate()
    assert service.ended() == 0  # Restart=on-failure leaves it at that
    assert mount_entry(mountpoint) is None


def test_the_unit_is_one_that_systemd_can_wait_for() -> None:
    directives = unit()
    assert directives["Type"] == ["notify"]
    assert directives["NotifyAccess"] == ["all"]  # the engine speaks, and with the native front it is a child
    assert directives["Restart"] == ["on-failure"]
    assert "--foreground" in directives["ExecStart"][0]


def test_the_example_file_names_only_settings_that_exist(tmp_path: Path) -> None:
    text = (DEPLOY / "example.toml").read_text()
    file = tmp_path / "all.toml"
    file.write_text(
        re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE).replace('tier = ["ram:16G", ', "tier = [")
    )
    assert len(tomllib.loads(file.read_text())) > 12
    settings = load({"state_dir": str(tmp_path / "state")}, config_file=file, environ={})
    assert settings.source == "s3://my-bucket/datasets"
    assert settings.ttl_s == 60.0
    assert settings.fsync == "local"


def test_the_example_lines_of_fstab_are_understood() -> None:
    lines = [
        line.split()
        for line in (DEPLOY / "fstab.example").read_text().splitlines()
        if line[:1] not in {"#", ""}
    ]
    assert len(lines) >= 4
    for source, mountpoint, kind, options, *_ in lines:
        assert kind == "tierfs"
        parsed = parse(options)
        parsed.settings.pop("tier", None)  # the machine's own sizes
        if source != "none":
            load(parsed.settings | {"source": source, "mountpoint": mountpoint, "tier": ["none"]}, environ={})


@pytest.fixture
def fstab_line(mount_factory: MountFactory, base_dir: Path) -> Iterator[tuple[Mounted, list[str]]]:
    """A mount that mount(8) makes from an fstab; ``/sbin/mount.tierfs`` must lead to this interpreter."""
    helper = Path("/sbin/mount.tierfs")
    if os.geteuid() != 0 or not helper.is_symlink():
        pytest.skip("/sbin/mount.tierfs is made by deploy/install.sh, as root")
    if helper.readlink().parent != Path(sys.executable).parent:
        pytest.skip(f"/sbin/mount.tierfs leads to another installation: {helper.readlink()}")
    mounted = mount_factory.prepare()
    fstab = base_dir / "fstab"
    options = (
        f"_netdev,nofail,uid=7,umask=027,noexec,state_dir={mounted.state_dir},tier={mounted.base / 'tier'}:1G"
    )
    fstab.write_text(f"{mounted.source} {mounted.path} tierfs {options},x-systemd.automount 0 0\n")
    yield mounted, ["mount", "-T", str(fstab)]
    if mount_entry(mounted.path):
        subprocess.run(["umount", str(mounted.path)], check=True)


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.needs_fuse
def test_a_line_of_fstab(fstab_line: tuple[Mounted, list[str]]) -> None:
    mounted, mount = fstab_line
    (mounted.store_dir / "f").write_bytes(b"1")
    environment = mounted.process_environment()
    done = subprocess.run(
        [*mount, str(mounted.path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    info = (mounted.path / "f").stat()
    assert (info.st_uid, info.st_mode & 0o777) == (7, 0o640)
    options = next(
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(mounted.path) in line
    )
    assert "noexec" in options.split()[5].split(",")
    pid = mounted.status()["engine"]["pid"]
    assert subprocess.run([*mount, "-a"], env=environment, check=False).returncode == 0  # is mounted already
    subprocess.run(["umount", str(mounted.path)], check=True)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "end of the engine")
