"""Notes of multipart uploads: what the next start aborts, and what it leaves alone."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tests.support.memory_store import MemoryStore
from tierfs.errors import StoreAccessDenied, StoreUnavailable, TierfsError
from tierfs.writeback import unfinished
from tierfs.writeback.unfinished import SKEW_NS, UnfinishedUploads

NOW_NS = 1_000 * SKEW_NS


def open_uploads(store: MemoryStore) -> list[str]:
    return [upload.upload_id for upload in store.list_unfinished_uploads("")]


def noted(directory: Path, store: MemoryStore) -> UnfinishedUploads:
    return UnfinishedUploads(directory, store, now_ns=lambda: NOW_NS)


def test_an_upload_with_a_name_is_aborted(tmp_path: Path) -> None:
    store = MemoryStore()
    uploads = noted(tmp_path, store)
    ours, theirs = store.start_multipart("k"), store.start_multipart("k")
    uploads.started(uploads.note("k"), "k", ours)
    assert noted(tmp_path, store).abort_all() == 1
    assert open_uploads(store) == [theirs]
    assert list(tmp_path.iterdir()) == []


def test_an_upload_without_a_name_is_looked_for(tmp_path: Path) -> None:
    store = MemoryStore()
    store.now_ns = lambda: NOW_NS - 2 * SKEW_NS  # type: ignore[method-assign]
    older = store.start_multipart("k")
    store.now_ns = lambda: NOW_NS - SKEW_NS // 2  # type: ignore[method-assign]
    beside = store.start_multipart("k2")
    store.start_multipart("k")
    noted(tmp_path, store).note("k")
    assert noted(tmp_path, store).abort_all() == 1
    assert open_uploads(store) == [older, beside]
    assert list(tmp_path.iterdir()) == []


def test_one_that_never_started_leaves_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    noted(tmp_path, store).note("k")
    assert noted(tmp_path, store).abort_all() == 0
    assert list(tmp_path.iterdir()) == []


def test_notes_are_kept_while_the_store_fails(tmp_path: Path) -> None:
    store = MemoryStore()
    uploads = noted(tmp_path, store)
    named = uploads.note("k")
    uploads.started(named, "k", store.start_multipart("k"))
    uploads.note("k")

    def fail(operation: str, key: str) -> None:
        raise StoreUnavailable("down")

    store.fail = fail
    assert noted(tmp_path, store).abort_all() == 0
    assert len(list(tmp_path.iterdir())) == 2
    store.fail = None
    noted(tmp_path, store).abort_all()
    assert open_uploads(store) == []
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_lists_no_uploads_is_asked_once(tmp_path: Path) -> None:
    store = MemoryStore()
    noted(tmp_path, store).note("k")

    def fail(operation: str, key: str) -> None:
        raise StoreAccessDenied("no")

    store.fail = fail
    assert noted(tmp_path, store).abort_all() == 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_of_a_note(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "1-a.new").write_text('{"key"')
    (tmp_path / "1-b.json").write_text("")
    assert noted(tmp_path, store).abort_all() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    uploads = noted(tmp_path, store)
    note = uploads.note("k")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(TierfsError, match=r"cannot be noted.*No space") as refused:
        uploads.note("other")
    assert refused.value.errno == errno.ENOSPC
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(TierfsError, match="cannot be noted"):
        uploads.started(note, "k", store.start_multipart("k"))
    assert list(tmp_path.iterdir()) == [note]


def test_a_start_that_failed_may_have_been_carried_out(tmp_path: Path) -> None:
    store = MemoryStore(now_ns=lambda: NOW_NS)
    uploads = noted(tmp_path, store)
    for _ in range(3):
        note = uploads.note("k")
        store.start_multipart("k")  # and the answer was lost
        uploads.failed(note)
    assert len(list(tmp_path.iterdir())) == 1
    note = uploads.note("k")
    named = store.start_multipart("k")
    uploads.started(note, "k", named)
    assert open_uploads(store) == [named]
    store.abort_multipart("k", named)
    uploads.done(note)
    other = uploads.note("k")
    beside = store.start_multipart("k")
    uploads.started(other, "k", store.start_multipart("k"))
    assert beside in open_uploads(store), "without a failure there is nothing to look for"


def test_failed_starts_are_not_remembered_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "MOST_UNNAMED", 3)
    uploads = noted(tmp_path, MemoryStore())
    for number in range(10):
        uploads.failed(uploads.note(f"k{number}"))
    assert len(list(tmp_path.iterdir())) == 3
