"""store.local: a directory that other tools use too. The common contract is in tests/contract."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tierfs.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StoreAccessDenied,
    StoreConfigError,
    StoreUnavailable,
    StoreUnsupported,
)
from tierfs.store.base import Condition, ObjectStore
from tierfs.store.local import LocalStore
from tierfs.store.local_walk import Walker
from tierfs.types import ObjectInfo


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


def keys(store: ObjectStore, prefix: str = "", *, recursive: bool = True) -> set[str]:
    page = store.list_page(prefix, recursive=recursive)
    assert page.next_token is None
    return {info.key for info in page.objects} | set(page.prefixes)


def test_objects_are_plain_files(store: LocalStore, root: Path) -> None:
    store.put("a/b/c.txt", b"content", metadata={"mode": "33188"})
    assert (root / "a/b/c.txt").read_bytes() == b"content"
    assert json.loads(os.getxattr(root / "a/b/c.txt", "user.tierfs.meta")) == {"metadata": {"mode": "33188"}}


def test_files_of_other_tools_appear(store: LocalStore, root: Path) -> None:
    (root / "d").mkdir()
    (root / "d/new").write_bytes(b"foreign")
    (root / "empty").mkdir()
    assert keys(store) == {"d/", "d/new", "empty/"}
    info = store.head("d/new")
    assert (info.size_bytes, info.metadata) == (7, {})
    assert store.get_range("d/new", 0, 7, if_match=info.etag) == b"foreign"
    assert store.head("empty/").size_bytes == 0


def test_links_are_deleted_by_the_version_that_they_show(store: LocalStore, root: Path) -> None:
    (root / "file").write_bytes(b"shown")
    (root / "link").symlink_to("file")
    (root / "out").symlink_to("/etc/hostname")
    etag = store.head("link").etag
    (failure,) = store.delete_many(["link"], {"link": "0-0-0"})
    assert failure.replaced
    assert store.delete_many(["link", "out"], {"link": etag, "out": etag}) == []
    assert sorted(path.name for path in root.iterdir()) == [".tierfs", "file", "out"]


def test_a_directory_that_is_no_marker_has_no_version(store: LocalStore, root: Path) -> None:
    marker = store.put("d/", b"")
    store.put("d/f", b"1")
    store.delete("d/")
    store.delete("d/", if_match=marker.etag)
    store.delete("d/", if_match="d-0")
    assert keys(store) == {"d/f"}


def test_names_that_are_not_utf8(store: LocalStore, root: Path) -> None:
    (root / os.fsdecode(b"latin-\xe9")).write_bytes(b"x")
    (key,) = keys(store)
    assert key == "latin-\uf7e9"
    assert store.get_range(key, 0, 1) == b"x"
    store.put("new-\uf7ff", b"")
    assert b"new-\xff" in os.listdir(os.fsencode(root))


@pytest.mark.parametrize("how", ["rewrite", "append", "replace", "touch"])
def test_changes_of_other_tools_change_the_etag(store: LocalStore, root: Path, how: str) -> None:
    before = store.put("f", b"0123456789")
    path = root / "f"
    if how == "rewrite":
        path.write_bytes(b"9876543210")
    elif how == "append":
        with path.open("ab") as file:
            file.write(b"x")
    elif how == "replace":
        (root / "g").write_bytes(b"9876543210")
        os.utime(root / "g", ns=(before.mtime_ns, before.mtime_ns))
        os.replace(root / "g", path)
    else:
        os.utime(path)
    assert store.head("f").etag != before.etag
    with pytest.raises(PreconditionFailed):
        store.get_range("f", 0, 10, if_match=before.etag)


def test_metadata_do_not_stick_to_a_replaced_file(root: Path) -> None:
    for use_xattrs in (True, False):
        store = LocalStore(root, use_xattrs=use_xattrs)
        store.put("f", b"ours", metadata={"mode": "1"})
        (root / "g").write_bytes(b"theirs")
        os.replace(root / "g", root / "f")
        assert store.head("f").metadata == {}


def test_sidecars_are_cleaned_up(root: Path) -> None:
    store = LocalStore(root, use_xattrs=False)
    for n in range(3):
        store.put("d/f", b"%d" % n, metadata={"n": str(n)})
    assert len(list((root / ".tierfs/meta").glob("*.json"))) == 2  # of d/ and d/f
    assert store.head("d/f").metadata == {"n": "2"}
    store.delete("d/f")
    assert list((root / ".tierfs/meta").glob("*.json")) == []


def test_damaged_metadata_are_none(store: LocalStore, root: Path) -> None:
    store.put("f", b"")
    os.setxattr(root / "f", "user.tierfs.meta", b'{"metadata": [1')
    assert store.head("f").metadata == {}
    os.setxattr(root / "f", "user.tierfs.meta", b"\xff")
    assert store.head("f").metadata == {}


def test_an_object_and_its_own_subtree_exclude_each_other(store: LocalStore, root: Path) -> None:
    store.put("x", b"1")
    with pytest.raises(StoreUnsupported, match="x/y"):
        store.put("x/y", b"2")
    store.put("d/e", b"1")
    with pytest.raises(StoreUnsupported, match="'d/'"):
        store.put("d", b"2")
    with pytest.raises(StoreUnsupported):
        store.copy(store.head("x"), "d")
    assert (root / "x").read_bytes() == b"1"
    store.delete("x")
    store.put("x/y", b"2")


@pytest.mark.parametrize("key", ["", "/", "/a", "a//b", "./a", "../a", "a/../../b", "a/..", "n" * 256, "nul\0",
                                 ".tierfs/tmp/x", ".tierfs/uploads/x", ".tierfs/meta/x", ".tierfs/lock", ".tierfs"])
def test_keys_without_a_path_are_refused(store: LocalStore, root: Path, key: str) -> None:
    (root.parent / "a").write_bytes(b"outside")
    with pytest.raises(StoreConfigError):
        store.put(key, b"1")
    with pytest.raises(ObjectNotFound):
        store.head(key)
    with pytest.raises(ObjectNotFound):
        store.get_range(key, 0, 1)
    store.delete(key)
    assert (root.parent / "a").read_bytes() == b"outside"


def test_links_out_of_the_store_are_not_followed(store: LocalStore, root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "file-link").symlink_to(outside / "secret")
    (root / "dir-link").symlink_to(outside)
    (root / "up").symlink_to("..")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    assert keys(store) == set()
    assert keys(store, recursive=False) == set()
    for key in ("file-link", "dir-link/secret", "up/outside/secret", "dangling", "loop", "dir-link/"):
        with pytest.raises(ObjectNotFound):
            store.head(key)
        with pytest.raises(ObjectNotFound):
            store.get_range(key, 0, 6)
    assert keys(store, "dir-link/") == set()
    with pytest.raises(StoreUnsupported):
        store.put("dir-link/new", b"1")
    store.delete("dir-link/secret")
    assert os.listdir(outside) == ["secret"]
    store.put("file-link", b"ours")
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (root / "file-link").is_symlink()


def test_links_to_files_inside_are_objects(store: LocalStore, root: Path) -> None:
    store.put("blobs/1", b"blob")
    (root / "snap").mkdir()
    (root / "snap/model").symlink_to("../blobs/1")
    (root / "snap/blobs").symlink_to("../blobs")
    (root / "snap/hidden").symlink_to("../.tierfs/lock")
    assert keys(store, "snap/") == {"snap/", "snap/model"}
    assert store.get_range("snap/model", 0, 4) == b"blob"
    assert store.head("snap/model").etag == store.head("blobs/1").etag
    store.delete("snap/model")
    assert store.head("blobs/1").size_bytes == 4


def test_special_files_are_no_objects(store: LocalStore, root: Path) -> None:
    os.mkfifo(root / "fifo")
    assert keys(store) == set()
    with pytest.raises(ObjectNotFound):
        store.get_range("fifo", 0, 1)  # and does not hang


def test_directories_made_for_a_key_go_with_it(store: LocalStore, root: Path) -> None:
    (root / "theirs").mkdir()
    store.put("theirs/a/b", b"1")
    store.put("ours/a/b", b"1")
    store.delete_many(["theirs/a/b", "ours/a/b"])
    assert keys(store) == {"theirs/"}
    assert sorted(os.listdir(root)) == [".tierfs", "theirs"]


def test_marker_deleted_from_a_directory_in_use(store: LocalStore) -> None:
    store.put("m/", b"", metadata={"mode": "1"})
    store.put("m/x", b"1")
    store.delete("m/")
    assert keys(store) == {"m/x"}
    with pytest.raises(ObjectNotFound):
        store.head("m/")
    store.delete("m/x")
    assert keys(store) == set()


def test_an_unmounted_disk_is_an_outage(store: LocalStore, root: Path) -> None:
    store.put("d/f", b"1")
    root.rename(root.parent / "elsewhere")
    for put_back in (False, True):
        if put_back:
            root.mkdir()
        for call in (lambda: store.head("d/f"), lambda: store.list_page(""), lambda: store.delete("d/f"),
                     lambda: store.get_range("d/f", 0, 1), store.check):
            with pytest.raises(StoreUnavailable):
                call()
    with pytest.raises(StoreUnavailable):
        store.put("d/g", b"1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_read_only_directory_can_be_read() -> None:
    script = (
        "import os, sys\n"
        "from tierfs.store.local import LocalStore\n"
        "from tierfs.errors import StoreAccessDenied\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "store = LocalStore(sys.argv[1])\n"
        "assert [i.key for i in store.list_page('').objects] == ['f']\n"
        "assert store.get_range('f', 0, 1) == b'1'\n"
        "try:\n    store.put('g', b'1')\n"
        "except StoreAccessDenied:\n    sys.exit(7)\n"
    )
    with tempfile.TemporaryDirectory() as root:  # not below tmp_path, which others may not enter
        os.chmod(root, 0o755)
        Path(root, "f").write_bytes(b"1")
        assert subprocess.run([sys.executable, "-c", script, root], check=False).returncode == 7


def test_unreadable_file_is_access_denied_not_absent(store: LocalStore, root: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("f", b"1")
    real_open = os.open

    def refuse(path: object, *arguments: object, **options: object) -> int:
        if path == os.fsencode(root / "f"):
            raise PermissionError(13, "refused")
        return real_open(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreAccessDenied):
        store.head("f")


def test_a_full_disk_is_transient_and_leaves_nothing(store: LocalStore, root: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreUnavailable, match="No space"):
        store.put("f", b"1")
    assert os.listdir(root / ".tierfs/tmp") == []
    assert keys(store) == set()


def test_old_temporary_files_are_removed(root: Path) -> None:
    (root / ".tierfs/tmp").mkdir(parents=True)
    for name, age_s in (("old", 100_000), ("new", 10)):
        (root / ".tierfs/tmp" / name).write_bytes(b"")
        os.utime(root / ".tierfs/tmp" / name, (time.time() - age_s,) * 2)
    LocalStore(root).put("f", b"")
    assert os.listdir(root / ".tierfs/tmp") == ["new"]


def test_public_keys_below_the_hidden_directory(store: LocalStore) -> None:
    store.put("a", b"")
    assert keys(store, recursive=False) == {"a"}
    store.put(".tierfs/long/1", b"1")
    assert keys(store) == {"a", ".tierfs/long/1"}
    assert keys(store, recursive=False) == {"a", ".tierfs/"}
    assert keys(store, ".tierfs/") == {".tierfs/long/1"}


def _increment(root: str, times: int) -> None:
    store = LocalStore(root)
    for _ in range(times):
        while True:
            info = store.head("n")
            try:
                value = int(store.get_range("n", 0, info.size_bytes, if_match=info.etag))
                store.put("n", b"%d" % (value + 1), condition=Condition(if_match=info.etag))
            except PreconditionFailed:
                continue
            break


def test_conditions_hold_between_processes(store: LocalStore, root: Path) -> None:
    store.put("n", b"0")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_increment, args=(str(root), 20)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert store.get_range("n", 0, 2) == b"40"


def test_an_upload_survives_the_process(store: LocalStore, root: Path) -> None:
    upload = store.start_multipart("big", metadata={"mode": "1"})
    parts = [store.upload_part("big", upload, 1, b"a" * 1000)]
    store.close()
    later = LocalStore(root)
    assert [found.upload_id for found in later.list_unfinished_uploads("")] == [upload]
    parts.append(later.upload_part("big", upload, 2, b"b" * 10))
    later.complete_multipart("big", upload, parts)
    assert (root / "big").read_bytes() == b"a" * 1000 + b"b" * 10
    assert later.head("big").metadata == {"mode": "1"}
    assert os.listdir(root / ".tierfs/uploads") == []


def test_equal_parts_are_not_copied(store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("parts are copied")

    monkeypatch.setattr("tierfs.store.local_uploads.copy_range", refuse)
    upload = store.start_multipart("big")
    parts = [store.upload_part("big", upload, n, bytes([n]) * 1000) for n in (2, 1, 3)]
    parts.append(store.upload_part("big", upload, 4, b"tail"))
    store.complete_multipart("big", upload, sorted(parts, key=lambda part: part.number))
    assert (root / "big").read_bytes() == b"\1" * 1000 + b"\2" * 1000 + b"\3" * 1000 + b"tail"


@pytest.mark.parametrize("order", [(3, 1, 2), (1, 3, 2)])
def test_parts_of_any_size_in_any_order(store: LocalStore, root: Path, order: tuple[int, ...]) -> None:
    bodies = {1: b"one" * 100, 2: b"two" * 500, 3: b"3"}
    upload = store.start_multipart("big")
    parts = {n: store.upload_part("big", upload, n, bodies[n]) for n in order}
    store.complete_multipart("big", upload, [parts[n] for n in (1, 2, 3)])
    assert (root / "big").read_bytes() == bodies[1] + bodies[2] + bodies[3]


def test_a_metadata_change_keeps_content_and_etag(store: LocalStore) -> None:
    info = store.put("f", b"content", metadata={"a": "1"})
    changed = store.copy(info, "f", metadata={"b": "2"})
    assert changed.etag == info.etag
    assert store.head("f").metadata == {"b": "2"}


def test_a_file_with_two_names_is_not_changed_through_one(store: LocalStore, root: Path) -> None:
    store.put("f", b"content", metadata={"a": "1"})
    os.link(root / "f", root / "g")
    store.copy(store.head("f"), "f", metadata={"b": "2"})
    assert store.head("g").metadata == {"a": "1"}
    assert store.head("f").metadata == {"b": "2"}


# Listing


def make_tree(root: Path, directories: int, files: int) -> set[str]:
    made = set()
    for d in range(directories):
        (root / f"d{d:03}").mkdir()
        made.add(f"d{d:03}/")
        for f in range(files):
            (root / f"d{d:03}/f{f:03}").write_bytes(b"")
            made.add(f"d{d:03}/f{f:03}")
    return made


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
@pytest.mark.parametrize("keep", [True, False])
def test_tokens_outlive_the_walk(store: LocalStore, root: Path, limit: int, keep: bool) -> None:
    """A token works whether or not the walk it names is still kept."""
    expected = make_tree(root, 4, 5) | {"z"}
    (root / "z").write_bytes(b"")
    found: list[str] = []
    token = None
    while True:
        page = store.list_page("", recursive=True, token=token, limit=limit)
        found += [info.key for info in page.objects]
        token = page.next_token
        if token is None:
            break
        if not keep:
            store = LocalStore(root)
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_page_may_be_asked_for_twice(store: LocalStore, root: Path) -> None:
    make_tree(root, 1, 10)
    first = store.list_page("d000/", limit=4)
    second = store.list_page("d000/", token=first.next_token, limit=4)
    again = store.list_page("d000/", token=first.next_token, limit=4)
    assert [info.key for info in again.objects] == [info.key for info in second.objects]


def test_entries_removed_while_paging(store: LocalStore, root: Path) -> None:
    make_tree(root, 1, 30)
    first = store.list_page("d000/", limit=10)
    for n in range(5, 30, 2):
        (root / f"d000/f{n:03}").unlink()
    seen = {info.key for info in first.objects}
    token = first.next_token
    while token is not None:
        page = store.list_page("d000/", token=token, limit=10)
        seen |= {info.key for info in page.objects}
        token = page.next_token
    assert {f"d000/f{n:03}" for n in range(0, 30, 2)} <= seen


def test_paging_is_linear(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory is scanned once, however many pages it takes."""
    make_tree(root, 3, 200)
    scans: list[object] = []
    real_scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scans.append(path) or real_scandir(path))
    store = LocalStore(root)
    token, pages = None, 0
    while True:
        page = store.list_page("", recursive=True, token=token, limit=10)
        token, pages = page.next_token, pages + 1
        if token is None:
            break
    assert pages == 61
    assert len(scans) == 4


def test_the_first_page_of_a_recursive_listing_is_lazy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(root, 50, 3)
    scans: list[object] = []
    real_scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scans.append(path) or real_scandir(path))
    assert len(LocalStore(root).list_page("", recursive=True, limit=10).objects) == 10
    assert len(scans) <= 5


def test_old_walks_are_dropped(root: Path) -> None:
    make_tree(root, 1, 3)
    now = [0.0]
    walker = Walker(os.fsencode(root), marker_of=lambda _: None, stat_link=lambda _: None,
                    on_skipped=lambda *_: None, clock=lambda: now[0])
    tokens = [walker.page("d000/", False, None, 1).next_token for _ in range(100)]
    assert len(walker._kept) <= 64
    now[0] += 1000
    page = walker.page("d000/", False, tokens[-1], 5)
    assert [info.key for info in page.objects] == ["d000/f001", "d000/f002"]


def test_an_unreadable_subdirectory_does_not_hide_its_siblings(store: LocalStore, root: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(root, 3, 1)
    real_scandir = os.scandir

    def refuse(path: bytes) -> object:
        if path.rstrip(b"/").endswith(b"d001"):
            raise PermissionError(13, "refused")
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert {"d000/f000", "d002/f000"} <= keys(store)
    with pytest.raises(StoreAccessDenied):
        store.list_page("d001/")


def test_a_source_that_changes_while_it_is_copied(store: LocalStore, root: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    info = store.put("from", b"0123456789")
    real_copy = os.copy_file_range

    def copy(source: int, *arguments: object) -> int:
        with (root / "from").open("r+b") as file:
            file.write(b"XX")
        return real_copy(source, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "copy_file_range", copy)
    with pytest.raises(PreconditionFailed):
        store.copy(info, "to")
    assert "to" not in keys(store)


def test_an_unknown_source_is_refused(store: LocalStore) -> None:
    store.put("from", b"0123456789")
    with pytest.raises(PreconditionFailed):
        store.copy(ObjectInfo("from", 10, "etag", 0), "to")
