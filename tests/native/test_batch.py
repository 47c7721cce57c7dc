"""``tierfs.read_many`` and ``open_many``: what open and read return, from wherever it comes."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
import xxhash

import benchmarks.batch
import tierfs
import tierfs_native
from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.page_cache import drop_pages
from tests.support.posix import as_user
from tierfs.batch import native, open_many, places, read_many, status
from tierfs.cache.segments import PACKED_BYTES
from tierfs.control.client import ControlClient
from tierfs.control.protocol import EvictRequest

semantics = pytest.mark.semantics
pytestmark = pytest.mark.usefixtures("needs_mount")

SIZES = (0, 1, 100, 4096, 50_000, 131_072, PACKED_BYTES, PACKED_BYTES + 1, 1_000_000)
FORK_LIMIT_S = 60.0


@pytest.fixture(scope="session")
def extension() -> native.Extension:
    """The module under test; where native code is tested at all it has to be there."""
    found = native.extension()
    if found is None:
        reason = native.why_missing()
        if os.environ.get("CI") or os.environ.get("TIERFS_NEED_NATIVE"):
            pytest.fail(f"batch reads cannot be tested: {reason}", pytrace=False)
        pytest.skip(f"batch reads cannot be tested: {reason}")
    return found


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, extension: native.Extension) -> Iterator[None]:
    """This process knows of no mount yet, and forgets them afterwards."""
    monkeypatch.setattr(places, "_places", None)
    yield
    monkeypatch.setattr(places, "_places", None)


@pytest.fixture
def mount(mount_factory: MountFactory, base_dir: Path, fresh: None,
          monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mounted]:
    """Makes mounts that this process finds."""
    run_dir = str(base_dir / "run")
    monkeypatch.setenv("TIERFS_RUN_DIR", run_dir)

    def make(*options: str, **settings: object) -> Mounted:
        # Objects that tests put into the store behind its back are seen at once.
        options = ("--negative-ttl", "0", *options)
        return mount_factory(environment={"TIERFS_RUN_DIR": run_dir}, options=options, **settings)

    return make


def fill(mounted: Mounted, count: int = 60, seed: int = 7) -> dict[str, bytes]:
    """Objects of all sizes in directories of some depth, put into the store behind the mount's back."""
    chance = random.Random(seed)
    made = {}
    for number in range(count):
        name = "/".join([*(f"d{chance.randrange(3)}" for _ in range(chance.randrange(4))), f"f{number}"])
        data = chance.randbytes(SIZES[number % len(SIZES)])
        path = mounted.store_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        made[str(mounted.path / name)] = data
    return made


def counts() -> dict[str, int]:
    return dict(places.current().files)


def local_files() -> int:
    return counts().get("local", 0)


def contents(paths: list[str]) -> list[bytes]:
    return [bytes(view) for view in read_many(paths)]


def make_local(paths: list[str]) -> None:
    """Until a tier has committed all of them."""

    def all_local() -> bool:
        before = local_files()
        read_many(paths)
        return local_files() - before == len(paths)

    wait_until(all_local, f"not all local: {status()}")


def in_child(function: Callable[[], None]) -> None:
    """Run in a forked child; what it raises fails the test."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    deadline = time.monotonic() + FORK_LIMIT_S
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0


class Busy:
    """Does something again and again in a thread while the test does something else."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


# -- what it returns


@semantics("S-BATCH-1", "`tierfs.read_many` returns what open and read through the mount would have returned at some moment during the call, the same errors included, whether the bytes come from a tier or through the mount.")
def test_the_bytes_of_a_tree(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    paths = list(tree)
    assert contents(paths) == list(tree.values())  # from the store
    make_local(paths)
    assert contents(paths) == list(tree.values())
    random.Random(1).shuffle(paths)
    assert contents(paths) == [tree[path] for path in paths]
    assert contents(paths) == [Path(path).read_bytes() for path in paths]


def test_more_files_than_are_open_at_once_and_some_larger_than_an_extent(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted, 700)
    for number, size in enumerate((8 << 20, (8 << 20) + 1, 21_000_000)):
        data = random.Random(size).randbytes(size)
        (mounted.store_dir / f"large{number}").write_bytes(data)
        tree[str(mounted.path / f"large{number}")] = data
    paths = list(tree)
    make_local(paths)
    assert contents(paths) == list(tree.values())


def test_a_path_that_comes_twice_is_read_twice(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    (path, data), *_ = [(p, d) for p, d in fill(mounted).items() if d]
    make_local([path])
    one, two = read_many([path, path])
    one[0] ^= 1
    assert bytes(two) == data


def test_views_are_not_overwritten_by_later_calls(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    paths = list(tree)
    make_local(paths)
    kept = []
    for start in range(0, len(paths), 7):
        chosen = paths[start : start + 7]
        kept += list(zip(chosen, read_many(chosen), strict=True))
    assert all(bytes(view) == tree[path] for path, view in kept)


def test_paths_of_every_kind(mount: Callable[..., Mounted], base_dir: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = mount()
    fill(mounted)
    name = b"\xff\xfe of any bytes"
    odd = os.fsencode(mounted.path) + b"/" + name
    Path(os.fsdecode(odd)).write_bytes(b"odd")
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / "plain").write_bytes(b"plain")
    (base_dir / "alias").symlink_to(mounted.path)
    mounted.flush()
    plain = mounted.path / "d" / "plain"
    make_local([os.fsdecode(odd), str(plain)])
    before = local_files()
    through_a_link = base_dir / "alias" / "d" / "plain"
    assert [bytes(v) for v in read_many([odd, plain, str(plain), through_a_link])] == [
        b"odd", b"plain", b"plain", b"plain"]
    monkeypatch.chdir(mounted.path / "d")
    assert contents(["plain", "./plain"]) == [b"plain", b"plain"]
    assert local_files() - before == 6
    assert contents(["../d/plain", f"{mounted.path}//d/plain", f"{mounted.path}/d/./plain"]) == [b"plain"] * 3
    monkeypatch.chdir("/")


def test_errors(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    fill(mounted)
    (mounted.path / "d").mkdir()
    (mounted.path / "link").symlink_to("f")
    (mounted.path / "f").write_bytes(b"target")
    os.mkfifo(mounted.path / "fifo")
    missing, directory, fifo = (str(mounted.path / name) for name in ("missing", "d", "fifo"))
    with pytest.raises(FileNotFoundError) as caught:
        read_many([str(mounted.path / "f"), missing, directory])
    assert caught.value.filename == missing
    with pytest.raises(IsADirectoryError):
        read_many([directory])
    with pytest.raises(OSError) as not_regular:
        read_many([fifo])
    assert not_regular.value.errno == errno.EINVAL
    with pytest.raises(NotADirectoryError):
        read_many([str(mounted.path / "f" / "below")])
    with pytest.raises(TypeError):
        read_many(missing)
    with pytest.raises(ValueError, match="errors"):
        read_many([missing], errors="ignore")  # type: ignore[call-overload]
    found = read_many([missing, str(mounted.path / "link"), directory], errors="return")
    assert isinstance(found[0], FileNotFoundError)
    assert bytes(found[1]) == b"target"  # type: ignore[arg-type]
    assert isinstance(found[2], IsADirectoryError)
    assert read_many([]) == []


def test_files_outside_and_of_two_mounts_in_one_call(mount: Callable[..., Mounted], base_dir: Path) -> None:
    one, two = mount(), mount()
    trees = [fill(one, seed=1), fill(two, seed=2)]
    outside = base_dir / "outside"
    outside.write_bytes(b"outside")
    paths = [path for pair in zip(*trees, strict=True) for path in pair]
    make_local(paths)
    before = counts()
    expected = [(trees[0] | trees[1])[path] for path in paths]
    assert contents([*paths, str(outside)]) == [*expected, b"outside"]
    assert local_files() - before["local"] == len(paths)
    assert counts()["outside"] == before.get("outside", 0) + 1
    assert {m.mountpoint: m.is_direct for m in status().mounts}.items() >= {
        str(one.path): True, str(two.path): True}.items()


def test_into_a_buffer(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    paths = list(tree)
    make_local(paths[10:])
    mounted.cli("evict", *paths[:10])
    with open_many(paths) as files:
        buffer = bytearray(files.buffer_bytes)
        views = files.read(buffer=buffer)
        assert [bytes(view) for view in views] == list(tree.values())
        views[3][0] = views[3][0] ^ 1
        assert bytes(views[3]) in bytes(buffer)
        del views
    views = read_many(paths, buffer=buffer)
    assert [bytes(view) for view in views] == list(tree.values())
    for target in (bytearray(100_000), memoryview(bytearray(sum(map(len, tree.values())) - 1))):
        with pytest.raises(ValueError, match="buffer"):
            read_many(paths, buffer=target)
    with pytest.raises(ValueError, match="writable"):
        read_many(paths, buffer=bytes(100))


# -- open_many


def test_open_many(mount: Callable[..., Mounted], monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = mount()
    tree = fill(mounted)
    paths = list(tree)
    with open_many(paths) as files:
        assert files.sizes == [len(data) for data in tree.values()]
        assert len(files) == len(paths)
        assert [bytes(view) for view in files] == list(tree.values())
        assert counts()["opened"] == len(paths)
    make_local(paths)
    monkeypatch.chdir(mounted.path)
    before = local_files()
    with open_many([os.path.relpath(path, mounted.path) for path in paths]) as files:
        assert files.sizes == [len(data) for data in tree.values()]
        assert [bytes(view) for view in files] == list(tree.values())
    assert local_files() - before == len(paths)
    monkeypatch.chdir("/")
    with open_many(paths) as files:
        assert [bytes(v) for v in files.read([5, 3, 5])] == [tree[paths[i]] for i in (5, 3, 5)]
        mounted.cli("evict", *paths)
        assert [bytes(view) for view in files.read()] == list(tree.values())
    with pytest.raises(FileNotFoundError):
        open_many([*paths, str(mounted.path / "missing")])


def test_a_name_that_means_another_file_by_now(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    path = mounted.path / "f"
    (mounted.store_dir / "f").write_bytes(b"old")
    make_local([str(path)])
    with open_many([path]) as files:
        (mounted.path / "new").write_bytes(b"newer")
        os.rename(mounted.path / "new", path)
        (found,) = files.read(errors="return")
        assert isinstance(found, OSError)
        assert found.errno == errno.ESTALE
        mounted.flush()
        make_local([str(path)])
        with pytest.raises(OSError) as caught:
            files.read()
        assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
    assert contents([str(path)]) == [b"newer"]


def test_what_was_not_local_at_the_look_up_is_the_file_that_was_opened(mount: Callable[..., Mounted]) -> None:
    mounted = mount("--upload-delay", "3600")
    path = mounted.path / "f"
    path.write_bytes(b"old")
    with open_many([path]) as files:
        (mounted.path / "new").write_bytes(b"newer")
        os.rename(mounted.path / "new", path)
        assert [bytes(view) for view in files.read()] == [b"old"]


# -- what changes


def test_what_is_being_written_comes_through_the_mount(mount: Callable[..., Mounted]) -> None:
    mounted = mount("--upload-delay", "3600")
    path = str(mounted.path / "f")
    Path(path).write_bytes(b"first")
    assert contents([path]) == [b"first"]
    assert counts().get("being_written") == 1
    with open(path, "r+b", buffering=0) as file:
        file.write(b"secon")
        assert contents([path]) == [b"secon"]
    mounted.flush()
    make_local([path])
    with open(path, "r+b", buffering=0) as file:
        for round_no in range(3):
            file.seek(0)
            file.write(b"%d" % round_no * 5)
            assert contents([path]) == [b"%d" % round_no * 5]
    os.truncate(path, 2)
    assert contents([path]) == [b"22"]
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        read_many([path])


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "by rename"])
def test_readers_of_a_file_that_is_rewritten_see_old_or_new(mount: Callable[..., Mounted], in_place: bool) -> None:
    mounted = mount("--upload-delay", "0")
    path, size = str(mounted.path / "f"), 300_000
    begun = finished = 0
    Path(path).write_bytes(bytes(size))

    def rewrite() -> None:
        nonlocal begun, finished
        begun += 1
        data = bytes([begun % 256]) * size
        if in_place:
            with open(path, "r+b", buffering=0) as file:
                assert file.write(data) == size
        else:
            Path(f"{path}.new").write_bytes(data)
            os.rename(f"{path}.new", path)
        finished = begun
        mounted.flush()  # so that it becomes clean, and is read from the tier

    begin = time.monotonic()
    with Busy(rewrite):
        while finished < 2 or (finished < 20 and time.monotonic() < begin + 5):
            oldest = finished
            (view,) = read_many([path])
            allowed = {number % 256 for number in range(oldest, begun + 1)}
            assert len(view) == size
            assert set(bytes(view)) <= allowed
            assert in_place or len(set(bytes(view))) == 1
    make_local([path])
    assert contents([path]) == [bytes([finished % 256]) * size]


def test_readers_during_renames(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    (mounted.store_dir / "a").write_bytes(b"A" * 5000)
    (mounted.store_dir / "b").write_bytes(b"B" * 6000)
    (mounted.store_dir / "still").write_bytes(b"S" * 7000)
    a, b, still, spare = (str(mounted.path / name) for name in ("a", "b", "still", "spare"))
    make_local([a, b, still])

    def swap() -> None:
        os.rename(a, spare)
        os.rename(b, a)
        os.rename(spare, b)

    seen = set()
    before = local_files()
    with Busy(swap):
        for _ in range(300):
            found = read_many([a, b, still], errors="return")
            assert bytes(found[2]) == b"S" * 7000  # type: ignore[arg-type]
            for one in found[:2]:
                if isinstance(one, OSError):
                    assert one.errno == errno.ENOENT
                else:
                    assert bytes(one) in {b"A" * 5000, b"B" * 6000}
                    seen.add(bytes(one[:1]))
    assert seen == {b"A", b"B"}
    assert local_files() - before >= 300


def test_readers_while_files_are_removed_and_made_again(mount: Callable[..., Mounted]) -> None:
    mounted = mount("--upload-delay", "0")
    data = random.Random(3).randbytes(70_000)
    path = str(mounted.path / "f")
    reads = 0

    def remake() -> None:
        Path(path).write_bytes(data)
        mounted.flush(path)
        os.unlink(path)
        before = reads
        wait_until(lambda: stopped or reads >= before + 2, "a read while it is removed")

    outcomes = set()
    stopped = False
    begin = time.monotonic()
    with Busy(remake):
        while len(outcomes) < 2 or time.monotonic() < begin + 3:
            (found,) = read_many([path], errors="return")
            reads += 1
            if isinstance(found, OSError):
                assert found.errno == errno.ENOENT
            else:
                # A prefix while it is being written.
                assert bytes(found) == data[: len(found)]
            outcomes.add(isinstance(found, OSError))
        stopped = True


def test_readers_during_evictions(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted, 40)
    paths = list(tree)
    make_local(paths)
    relative = [os.fsencode(os.path.relpath(path, mounted.path)) for path in paths]
    (record,) = (m for m in places.registry.records() if m.mountpoint == str(mounted.path))
    chance = random.Random(5)

    def evict_and_fetch() -> None:
        chosen = chance.sample(range(len(paths)), 8)
        with ControlClient(record.socket_path, timeout_s=30) as client:
            client.call("evict", EvictRequest(paths=[relative[number] for number in chosen]))
        for number in chosen[:6]:
            os.posix_fadvise(fd := os.open(paths[number], os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(fd, 1 << 20, 0)
            os.close(fd)

    before = local_files()
    with Busy(evict_and_fetch):
        for _ in range(120):
            for path, view in zip(paths, read_many(paths), strict=True):
                assert bytes(view) == tree[path], path
    assert local_files() > before
    assert counts().get("absent", 0) > 0


def test_another_version_in_the_store_is_seen_after_the_time_to_live(mount: Callable[..., Mounted]) -> None:
    mounted = mount("--ttl", "1")
    path = str(mounted.path / "f")
    (mounted.store_dir / "f").write_bytes(b"old")
    assert contents([path]) == [b"old"]
    time.sleep(0.6)
    (mounted.store_dir / "f").write_bytes(b"newer")
    wait_until(lambda: contents([path]) == [b"newer"], "the new version", 10)


def test_bytes_that_were_damaged_on_the_device_are_not_returned(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = {path: data for path, data in fill(mounted, 30).items() if len(data) <= PACKED_BYTES}
    paths = list(tree)
    make_local(paths)
    segments = list((mounted.base / "tier" / "segments").iterdir())
    assert segments
    for segment in segments:
        with open(segment, "r+b", buffering=0) as damaged:
            for start in range(0, os.fstat(damaged.fileno()).st_size, 4096):
                damaged.seek(start)
                damaged.write(b"!")
            drop_pages(damaged.fileno())
    assert contents(paths) == list(tree.values())
    assert counts()["unreadable"] > 0


# -- who may


@semantics("S-BATCH-2", "`tierfs.read_many` returns no byte that its caller could not read through the mount.")
def test_another_user_gets_what_the_mount_gives(mount: Callable[..., Mounted], other_user: tuple[int, int]) -> None:
    mounted = mount()
    tree = fill(mounted, 9)
    paths = list(tree)
    secret, locked = str(mounted.path / "secret"), str(mounted.path / "locked" / "f")
    Path(secret).write_bytes(b"secret")
    os.chmod(secret, 0o600)
    os.mkdir(os.path.dirname(locked))
    Path(locked).write_bytes(b"locked")
    os.chmod(os.path.dirname(locked), 0o700)
    mounted.flush()
    make_local([*paths, secret, locked])

    def look() -> None:
        before = local_files()
        assert contents(paths) == list(tree.values())
        for path in (secret, locked):
            (found,) = read_many([path], errors="return")
            assert isinstance(found, PermissionError), found
        assert local_files() == before

    as_user(*other_user, look)

    def become_and_look() -> None:
        os.setgroups([])
        os.setgid(other_user[1])
        os.setuid(other_user[0])
        look()

    in_child(become_and_look)
    assert contents([secret, locked]) == [b"secret", b"locked"]


def drop_capabilities() -> None:
    """Of this thread: root is a user like any other then, as far as files are concerned."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capset(ctypes.byref(header), sets) == 0


def test_root_without_capabilities_is_checked_by_mode(mount: Callable[..., Mounted]) -> None:
    if os.geteuid() != 0:
        pytest.skip("is about root")
    mounted = mount()
    tree = fill(mounted, 18)
    paths = list(tree)
    made = {name: str(mounted.path / name) for name in ("none", "other", "group", "dir/f", "own")}
    os.mkdir(mounted.path / "dir")
    for name, path in made.items():
        Path(path).write_bytes(name.encode())
    os.chmod(made["none"], 0)
    os.chmod(made["own"], 0o400)
    os.chown(made["other"], 12345, 12345)
    os.chmod(made["other"], 0o640)
    os.chown(made["group"], 12345, 0)
    os.chmod(made["group"], 0o604)  # the group has fewer rights than the others
    os.chmod(mounted.path / "dir", 0o600)
    mounted.flush()
    make_local([*paths, *made.values()])

    def look() -> None:
        drop_capabilities()
        before = local_files()
        assert contents([*paths, made["own"]]) == [*tree.values(), b"own"]
        assert local_files() - before == len(paths) + 1
        for name in ("none", "other", "group", "dir/f"):
            with pytest.raises(PermissionError):
                Path(made[name]).read_bytes()
            (found,) = read_many([made[name]], errors="return")
            assert isinstance(found, PermissionError), (name, found)
        assert local_files() - before == len(paths) + 1

    in_child(look)


# -- processes and threads


@semantics("S-BATCH-3", "After a fork, parent and child can both go on calling `tierfs.read_many`; nothing has to be closed or opened anew.")
def test_fork(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    paths = list(tree)
    make_local(paths)

    def read_and_fork_again() -> None:
        before = local_files()
        assert contents(paths) == list(tree.values())
        assert local_files() - before == len(paths)
        in_child(read)

    def read() -> None:
        assert contents(paths) == list(tree.values())
        assert all(mount.is_direct for mount in status().mounts if mount.mountpoint == str(mounted.path))

    in_child(read_and_fork_again)
    assert contents(paths) == list(tree.values())
    held = read_many(paths)
    in_child(lambda: held.clear())  # the child frees what the parent read
    assert contents(paths) == list(tree.values())


def test_fork_while_other_threads_read(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted, 30)
    paths = list(tree)
    make_local(paths)

    def step() -> None:
        assert contents(paths) == list(tree.values())

    with Busy(step), Busy(step):
        for _ in range(8):
            in_child(step)


def test_threads(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    paths = list(tree)
    make_local(paths)
    failures: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            chosen = chance.sample(paths, 25)
            failures.extend(p for p, d in zip(chosen, contents(chosen), strict=True) if d != tree[p])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_remount_and_a_crash_are_noticed(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    paths = list(tree)
    make_local(paths)
    mounted.remount()
    make_local(paths)
    assert contents(paths) == list(tree.values())
    mounted.crash_and_restart()
    make_local(paths)
    assert contents(paths) == list(tree.values())
    mounted.umount()
    with pytest.raises(FileNotFoundError):
        read_many(paths)
    assert str(mounted.path) not in {m.mountpoint for m in status().mounts}


# -- when it cannot be had directly


@semantics("S-BATCH-4", "Where nothing can be read directly, `tierfs.read_many` reads every file through the mount, and `tierfs.batch.status` says why.")
def test_without_the_extension(mount: Callable[..., Mounted], monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = mount()
    tree = fill(mounted)
    monkeypatch.setattr(tierfs_native, "batch", lambda: None)
    monkeypatch.setattr(tierfs_native, "why_missing", lambda part: "it has not been built here")
    assert contents(list(tree)) == list(tree.values())
    with open_many(list(tree)) as files:
        assert files.sizes == [len(data) for data in tree.values()]
    said = status()
    assert (said.is_native, said.why) == (False, "it has not been built here")
    assert said.files == {"local": 0, "outside": len(tree)}


def test_a_mount_of_which_nothing_is_known(mount: Callable[..., Mounted], monkeypatch: pytest.MonkeyPatch,
                                           base_dir: Path) -> None:
    mounted = mount()
    tree = fill(mounted)
    monkeypatch.setenv("TIERFS_RUN_DIR", str(base_dir / "elsewhere"))
    assert contents(list(tree)) == list(tree.values())
    (said,) = (m for m in status().mounts if m.mountpoint == str(mounted.path))
    assert (said.is_direct, said.why) == (False, "this user has no record of its engine")


def test_a_namespace_that_this_process_has_open_is_left_alone(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    with lmdb.open(str(mounted.state_dir / "namespace.lmdb"), readonly=True, max_dbs=16):
        assert contents(list(tree)) == list(tree.values())
        (said,) = (m for m in status().mounts if m.mountpoint == str(mounted.path))
        assert not said.is_direct
        assert "has" in said.why
        assert "open already" in said.why
        in_child(lambda: read_many(list(tree)) and None)


def test_no_tiers(mount: Callable[..., Mounted]) -> None:
    mounted = mount(tiers=())
    tree = fill(mounted)
    for _ in range(2):
        assert contents(list(tree)) == list(tree.values())


def test_a_ram_tier_before_a_disk_tier(mount: Callable[..., Mounted], base_dir: Path) -> None:
    mounted = mount(tiers=("ram:2M", f"{base_dir / 'disk'}:1G"))
    tree = fill(mounted)
    paths = list(tree)
    before = local_files()
    for _ in range(4):
        assert contents(paths) == list(tree.values())
        time.sleep(0.4)  # what the first tier gives up goes to the second, and the indexes follow
    assert local_files() - before > 2 * len(paths)


# -- parts


def test_checksums_are_those_of_tiers(extension: native.Extension) -> None:
    for size in [*range(300), 511, 1023, 1024, 1025, 4096, 77_777, 131_071, 131_072]:
        data = random.Random(size).randbytes(size)
        assert extension.checksum(data) == xxhash.xxh3_64_intdigest(data), size


def test_a_reader_belongs_to_its_process(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    fill(mounted)
    status()
    (reader,) = [p.reader for p in places.current().all() if p.reader and p.mount.path == str(mounted.path)]

    def use() -> None:
        with pytest.raises(RuntimeError, match="another process"):
            reader.has_ring()

    in_child(use)


def test_names_of_the_package() -> None:
    assert tierfs.read_many is read_many
    assert tierfs.open_many is open_many
    with pytest.raises(AttributeError):
        _ = tierfs.read_some  # type: ignore[attr-defined]


def readers_of(directory: Path) -> set[int]:
    """Processes, alive or not, that have slots in the reader table of a data base."""
    with lmdb.open(str(directory), readonly=True, max_dbs=16) as environment:
        lines = environment.readers().strip().splitlines()[1:]  # a headline
        return {int(line.split()[0]) for line in lines}


def test_workers_leave_no_slots_behind(mount: Callable[..., Mounted]) -> None:
    mounted = mount()
    tree = fill(mounted)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        workers = [context.Process(target=contents, args=(list(tree),)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        used = readers_of(mounted.state_dir / "namespace.lmdb")
        assert not used & {worker.pid for worker in workers}


def test_the_benchmark_runs(fresh: None, base_dir: Path, monkeypatch: pytest.MonkeyPatch,
                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TIERFS_RUN_DIR", str(base_dir / "run"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # if it is not installed
    arguments = "--files 200 --batch 50 --readers 2 --passes 1 --rounds 1 --hot-only --work-dir"
    assert benchmarks.batch.main([*arguments.split(), str(base_dir)]) == 0
    assert "hot, 2 readers" in capsys.readouterr().out
