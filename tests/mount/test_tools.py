"""The tools people use, unmodified: tar, rsync, cp, git, sqlite, fio, find. Missing tools skip."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.mount import Mounted


def needs(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")


def sh(command: str, **variables: object) -> str:
    """Run a shell command with ``$A``-style variables; a non-zero exit fails with its output."""
    environment = os.environ | {name: str(value) for name, value in variables.items()} | {"LC_ALL": "C"}
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=140,
        text=True,
        errors="replace",
        check=False,
    )
    assert answer.returncode == 0, f"{command}\n{answer.stdout}"
    return answer.stdout


@pytest.fixture
def sample(base_dir: Path) -> Path:
    """A source tree outside the mount, with modes, owners, links, odd names, sparse and special files."""
    chance = random.Random(1)
    top = base_dir / "sample"
    for d in range(4):
        below = top / f"d{d}" / "sub"
        below.mkdir(parents=True)
        for i in range(12):
            path = below / f"f{i} {'é' if i % 5 == 0 else ''}"
            path.write_bytes(chance.randbytes(chance.choice([0, 1, 511, 4096, 4097, 70_000])))
            if os.geteuid() == 0:
                os.chown(path, chance.choice([0, 1000]), chance.choice([0, 100]))
            path.chmod(chance.choice([0o644, 0o600, 0o755, 0o4755, 0o444]))
            os.utime(path, ns=((1_600_000_000 + i) * 10**9, (1_600_000_000 + i) * 10**9 + 123_456_789))
        os.symlink("f1 ", below / "sym")
        os.symlink("/nonexistent", below / "dangling")
        os.link(below / "f2 ", below / "hard")
        os.mkfifo(below / "fifo")
        below.chmod(0o1777 if d == 3 else 0o750)
        os.utime(below, ns=(1_600_000_000 * 10**9, 1_600_000_000 * 10**9 + 5000))
    with open(top / "sparse", "wb") as file:
        file.truncate(20 << 20)
        file.seek(10 << 20)
        file.write(b"x" * 4096)
    (top / ("n" * 255)).write_text("long name")
    (top / "big").write_bytes(chance.randbytes(9 << 20))
    os.symlink("t" * 1000, top / "longlink")
    os.setxattr(top / "big", "user.k", b"v1")
    return top


SIGNATURE = r"""cd "$1"; find . -mindepth 1 \( -type f -printf '%y %m %U %G %n %s %T@ %p\n' \) \
    -o \( -type l -printf '%y %U %G %l %p\n' \) \
    -o \( ! -type f ! -type l -printf '%y %m %U %G %p\n' \) | sort
    find . -type f -print0 | sort -z | xargs -0 md5sum"""


def signature(path: Path) -> str:
    return sh(f'sign() {{ {SIGNATURE}; }}; sign "$A"', A=path)


def test_tar(workdir: Path, sample: Path) -> None:
    want = signature(sample)
    sh('mkdir "$W/a"; tar --format=posix -C "$S" -cf - . | tar -C "$W/a" -xpf -', W=workdir, S=sample)
    assert signature(workdir / "a") == want
    sh(
        'mkdir "$W/b"; tar --format=posix -C "$W/a" -czf "$W/a.tgz" .; tar -C "$W/b" -xpzf "$W/a.tgz"',
        W=workdir,
    )
    assert signature(workdir / "b") == want
    sh('tar -C "$W/a" -df "$W/a.tgz"', W=workdir)
    said = sh('tar -C "$W/a" -cf /dev/null . 2>&1', W=workdir)
    assert "changed as we read" not in said


def test_tar_of_uploaded_and_remounted_tree(mounted: Mounted, sample: Path) -> None:
    sh('tar --format=posix -C "$S" -cf - . | tar -C "$W" -xpf -', W=mounted.path, S=sample)
    want = signature(sample)
    mounted.remount()
    assert signature(mounted.path) == want


def test_rsync(workdir: Path, sample: Path) -> None:
    needs("rsync")
    want = signature(sample)
    sh('rsync -aH --checksum "$S/" "$W/r/"', W=workdir, S=sample)
    assert signature(workdir / "r") == want
    assert sh('rsync -aHi --checksum "$S/" "$W/r/"', W=workdir, S=sample) == ""
    assert sh('rsync -aHi "$S/" "$W/r/"', W=workdir, S=sample) == ""
    sh('echo q >>"$W/r/big"; rsync -aH --inplace --checksum "$S/" "$W/r/"', W=workdir, S=sample)
    sh('mkdir "$W/r/extra"; touch "$W/r/extra/1"; rsync -aH --delete "$S/" "$W/r/"', W=workdir, S=sample)
    assert signature(workdir / "r") == want
    sh('rsync -aH --link-dest="$W/r" "$S/" "$W/r2/"', W=workdir, S=sample)
    assert os.stat(workdir / "r" / "big").st_ino == os.stat(workdir / "r2" / "big").st_ino
    sh('rsync -aS "$S/sparse" "$W/sp"; cmp "$S/sparse" "$W/sp"', W=workdir, S=sample)
    assert os.stat(workdir / "sp").st_blocks < 8000
    sh('rsync -aHX "$S/" "$W/rx/"', W=workdir, S=sample)
    assert os.getxattr(workdir / "rx" / "big", "user.k") == b"v1"


def test_cp_and_mv(workdir: Path, sample: Path) -> None:
    want = signature(sample)
    sh('cp -a "$S/." "$W/a/"', W=workdir, S=sample)
    assert signature(workdir / "a") == want
    sh('cp -a "$W/a" "$W/b"; mv "$W/b" "$W/c"', W=workdir)
    assert signature(workdir / "c") == want
    sh('cp -a "$S" "$S.m"; mv "$S.m" "$W/mv"', W=workdir, S=sample)
    assert signature(workdir / "mv") == want
    sh('cp --sparse=always "$S/sparse" "$W/sp"; cmp "$S/sparse" "$W/sp"', W=workdir, S=sample)
    sh('rm -rf "$W/a" "$W/c" "$W/mv"', W=workdir)
    assert os.listdir(workdir) == ["sp"]


def test_dd_in_the_middle(workdir: Path, sample: Path) -> None:
    for where in (workdir, sample):
        zeros = 'dd if=/dev/zero of="$W/dd" bs=1 seek=4000 count=5000 conv=notrunc status=none'
        sh('cp "$S/big" "$W/dd"; ' + zeros, S=sample, W=where)
    assert (workdir / "dd").read_bytes() == (sample / "dd").read_bytes()


def test_git(workdir: Path, sample: Path) -> None:
    needs("git")
    script = """
        export HOME="$W" GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.com
        export GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.com
        git init -q "$W/repo"; cd "$W/repo"; git config gc.auto 0
        cp -r "$S/d0" "$S/big" . 2>/dev/null || true
        rm -f d0/sub/fifo; git add -A; git commit -qm one
        echo more >>big; git commit -qam two
        git checkout -q -b side HEAD~1; echo x >y; git add y; git commit -qm three
        git merge -q -m merged master 2>/dev/null || git merge -q -m merged main
        git gc -q; git fsck --strict 2>&1; git status --porcelain; git clone -q "$W/repo" "$W/clone"
        git -C "$W/clone" log --oneline | wc -l
    """
    said = sh(script, W=workdir, S=sample)
    assert said.split()[-1] == "4", said


@pytest.mark.parametrize("mode", ["delete", "truncate", "persist", "wal", "memory", "off"])
def test_sqlite(workdir: Path, mode: str) -> None:
    chance = random.Random(3)
    path = workdir / "db"
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute(f"pragma journal_mode={mode}").fetchone()[0] == mode
    connection.execute("create table t(a integer primary key, b blob)")
    want: dict[int, bytes] = {}
    for _ in range(25):
        connection.execute("begin")
        for _ in range(20):
            key, value = chance.randrange(400), chance.randbytes(chance.randrange(2000))
            connection.execute("insert or replace into t values(?,?)", (key, value))
            want[key] = value
        connection.execute("commit")
    connection.execute("delete from t where a % 3 = 0")
    want = {key: value for key, value in want.items() if key % 3}
    connection.execute("vacuum")
    assert connection.execute("pragma integrity_check").fetchone()[0] == "ok"
    connection.close()
    again = sqlite3.connect(path)
    assert dict(again.execute("select * from t")) == want
    again.close()


def test_sqlite_database_survives_a_killed_engine(mounted: Mounted) -> None:
    path = mounted.path / "db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma synchronous=full")
    connection.execute("create table t(a)")
    for i in range(30):
        connection.execute("insert into t values(?)", (i,))
    if not mounted.is_plain:
        mounted.kill9()
        try:
            connection.close()
        except sqlite3.Error:
            pass
        mounted.start()
    again = sqlite3.connect(path)
    assert again.execute("pragma integrity_check").fetchone()[0] == "ok"
    assert again.execute("select count(*) from t").fetchone()[0] == 30
    again.close()
    connection.close()


@pytest.mark.parametrize(
    "job",
    [
        "--ioengine=psync --rw=write --bs=128k --size=16m",
        "--ioengine=psync --rw=randwrite --bs=4k --size=4m",
        "--ioengine=psync --rw=randwrite --bsrange=1k-37k --bs_unaligned=1 --size=4m",
        "--ioengine=mmap --rw=randwrite --bs=4k --size=4m",
        "--ioengine=psync --direct=1 --rw=randwrite --bs=4k --size=2m",
        "--ioengine=psync --rw=write --bs=64k --fsync=1 --size=1m",
        "--ioengine=psync --rw=randwrite --bs=16k --size=2m --numjobs=4",
    ],
)
def test_fio_verifies_what_it_wrote(workdir: Path, job: str) -> None:
    needs("fio")
    sh(
        f'fio --name=v --directory="$W" --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 '
        f"--randrepeat=1 --thread --fallocate=none {job}",
        W=workdir,
    )


def test_find_and_du(workdir: Path, sample: Path) -> None:
    sh('cp -a "$S/." "$W/a/"', W=workdir, S=sample)
    assert sh('cd "$W/a"; find . | sort', W=workdir) == sh('cd "$W"; find . | sort', W=sample)
    apparent = [
        sh('du -s --apparent-size --exclude=sub "$W" | cut -f1', W=where) for where in (workdir / "a", sample)
    ]
    assert abs(int(apparent[0]) - int(apparent[1])) < 100  # directories have a size of their own


def test_python_shutil_and_tarfile_round_trip(workdir: Path, sample: Path) -> None:
    (sample / "d1" / "sub" / "fifo").unlink()
    shutil.copytree(sample / "d1", workdir / "copy", symlinks=True)
    shutil.make_archive(str(workdir / "z"), "gztar", workdir / "copy")
    with tarfile.open(workdir / "z.tar.gz") as archive:
        if hasattr(tarfile, "fully_trusted_filter"):  # without it newer Pythons warn, older ones lack it
            archive.extraction_filter = tarfile.fully_trusted_filter
        archive.extractall(workdir / "back")
    for name in os.listdir(sample / "d1" / "sub"):
        original, back = sample / "d1" / "sub" / name, workdir / "back" / "sub" / name
        assert stat.S_IFMT(os.lstat(original).st_mode) == stat.S_IFMT(os.lstat(back).st_mode)
        if original.is_file():
            assert original.read_bytes() == back.read_bytes()
