"""The index of a tier: batches, reopening, damage, and how much opening costs."""

from __future__ import annotations

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.cache import blocks, record
from tierfs.cache.index import IndexWriteFailed, TierIndex
from tierfs.cache.index_opening import FORMAT, IndexDamaged
from tierfs.cache.record import Extent
from tierfs.errors import FormatError
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

A = ContentId(b"a" * 16)
B = ContentId(b"b" * 16)
IDENTITY = record.identity_of(ObjectRef(A, "key/ä", "etag", 1, "v1"))


def an_extent(size_bytes: int, present: int, extent_no: int = 0) -> Extent:
    extent = Extent(size_bytes, blocks.blocks_in_extent(size_bytes, extent_no))
    for bit in blocks.bits(present):
        extent.mark(bit, bytes([bit]) * 8)
    return extent


def commit(index: TierIndex) -> None:
    index.commit_batch(index.take_batch())
    index.batch_done()


@pytest.fixture
def index(tmp_path):
    opened = TierIndex.open(tmp_path / "index.lmdb", b"boot")
    yield opened
    opened.close(clean=True)


def test_a_change_is_seen_at_once_and_after_the_commit(index):
    index.put(A, 0, an_extent(300_000, 0b101), IDENTITY)
    for _ in range(2):
        found = index.get(A, 0)
        assert found is not None
        assert (found.size_bytes, found.present) == (300_000, 0b101)
        assert found.sum_of(2) == bytes([2]) * 8
        assert index.identity(A, 0) == ("etag", "v1", "key/ä")
        assert index.extents_of(A) == [0]
        commit(index)


def test_used_bytes_follow_the_commits(index):
    index.put(A, 0, an_extent(300_000, 0b111), b"")
    index.put(B, 1, an_extent(20 << 20, 0b11, 1), b"")
    assert index.used_bytes == 0
    commit(index)
    tail = -(-(300_000 - 2 * BLOCK_SIZE_BYTES) // 4096) * 4096
    assert index.used_bytes == 2 * BLOCK_SIZE_BYTES + tail + 2 * BLOCK_SIZE_BYTES
    index.put(B, 1, an_extent(20 << 20, 0b1, 1), b"")
    index.drop(A)
    commit(index)
    assert index.used_bytes == BLOCK_SIZE_BYTES
    index.remove(B, 1)
    commit(index)
    assert index.used_bytes == 0


def test_drop_and_put_in_one_batch(index):
    index.put(A, 0, an_extent(20 << 20, 1), b"")
    index.put(A, 1, an_extent(20 << 20, 1, 1), b"")
    commit(index)
    index.drop(A)
    assert index.any_extent(A) is None
    assert index.committed_has(A)
    index.put(A, 2, an_extent(20 << 20, 1, 2), b"")
    assert (index.extents_of(A), index.any_extent(A), index.get(A, 0)) == ([2], 2, None)
    commit(index)
    assert (index.extents_of(A), index.any_extent(A), index.get(A, 0)) == ([2], 2, None)


def test_an_extent_without_blocks_is_no_record(index):
    index.put(A, 0, an_extent(300_000, 1), b"")
    commit(index)
    index.put(A, 0, an_extent(300_000, 0), b"")
    commit(index)
    assert not index.committed_has(A)


def test_a_failed_commit_is_part_of_the_next(index, monkeypatch):
    index.put(A, 0, an_extent(300_000, 1), b"")
    batch = index.take_batch()
    monkeypatch.setattr(index, "_env", FailingEnvironment(index._env))
    with pytest.raises(IndexWriteFailed):
        index.commit_batch(batch)
    monkeypatch.undo()
    index.put(B, 0, an_extent(300_000, 1), b"")
    index.put(A, 1, an_extent(20 << 20, 1, 1), b"")
    assert index.extents_of(A) == [0, 1]
    commit(index)
    assert index.committed_has(A)
    assert index.committed_has(B)
    assert index.extents_of(A) == [0, 1]


class FailingEnvironment:
    def __init__(self, real):
        self._real = real

    def begin(self, *args, **kwargs):
        if kwargs.get("write"):
            raise lmdb.DiskError("No space left on device")
        return self._real.begin(*args, **kwargs)


def test_opening_two_hundred_thousand_records_reads_none_of_them(tmp_path):
    index = TierIndex.open(tmp_path / "i", b"boot", sync=False)
    extent = an_extent(50_000, 1)
    for number in range(200_000):
        index.put(ContentId(number.to_bytes(16, "big")), 0, extent, IDENTITY)
    commit(index)
    used = index.used_bytes
    index.abandon()
    index = TierIndex.open(tmp_path / "i", b"boot", sync=False)
    assert index.records_read == 0
    assert index.used_bytes == used == 200_000 * 53_248
    assert index.get(ContentId((777).to_bytes(16, "big")), 0) is not None
    assert index.records_read == 1
    seen, position = 0, b""
    while position is not None:
        found, position = index.walk(position, 5000)
        assert len(found) <= 5000
        assert all((entry.extent_no, entry.nbytes) == (0, 53_248) for entry in found)
        seen += len(found)
    assert seen == 200_000
    index.close(clean=True)


@pytest.mark.parametrize(
    ("boot", "clean", "unverified"),
    [(b"boot", True, 0), (b"boot", False, 0), (b"other", True, 0), (b"other", False, 0b11)],
)
def test_what_an_unclean_reboot_makes_doubtful(tmp_path, boot, clean, unverified):
    index = TierIndex.open(tmp_path / "i", b"boot")
    index.put(A, 0, an_extent(300_000, 0b11), IDENTITY)
    commit(index)
    if clean:
        index.close(clean=True)
    else:
        index.abandon()
    index = TierIndex.open(tmp_path / "i", boot)
    found = index.get(A, 0)
    assert found.unverified == unverified
    if unverified:
        found.unverified = 0b10
        index.put(A, 0, found, IDENTITY)
        commit(index)
        assert index.get(A, 0).unverified == 0b10
        index.abandon()
        index = TierIndex.open(tmp_path / "i", b"third")
        assert index.get(A, 0).unverified == 0b11
    index.close(clean=True)


def test_pins_survive(tmp_path):
    index = TierIndex.open(tmp_path / "i", b"boot")
    index.set_pin(A, True)
    index.set_pin(B, True)
    commit(index)
    index.set_pin(B, False)
    index.close(clean=True)
    index = TierIndex.open(tmp_path / "i", b"boot")
    assert index.pins() == {A}
    index.drop(A)
    commit(index)
    assert index.pins() == set()
    index.close(clean=True)


def test_a_newer_format_is_refused_with_its_path(tmp_path):
    TierIndex.open(tmp_path / "i", b"boot").close(clean=True)
    with lmdb.open(str(tmp_path / "i"), max_dbs=8) as env:
        with env.begin(write=True, db=env.open_db(b"meta")) as txn:
            txn.put(b"format", b"tierfs tier index %d" % (FORMAT + 1))
    with pytest.raises(FormatError, match=str(tmp_path / "i")):
        TierIndex.open(tmp_path / "i", b"boot")


def test_a_foreign_data_base_is_refused_and_left_alone(tmp_path):
    with lmdb.open(str(tmp_path / "i"), max_dbs=8) as env:
        with env.begin(write=True) as txn:
            txn.put(b"somebody", b"else")
    with pytest.raises(FormatError, match="not the index of a tierfs tier"):
        TierIndex.open(tmp_path / "i", b"boot")
    with lmdb.open(str(tmp_path / "i"), max_dbs=8) as env:
        with env.begin() as txn:
            assert txn.get(b"somebody") == b"else"


@pytest.mark.parametrize("damage", ["garbage", "short", "one page", "zeros"])
def test_a_damaged_file_is_reported_not_mapped(tmp_path, damage):
    index = TierIndex.open(tmp_path / "i", b"boot")
    for number in range(500):
        index.put(ContentId(number.to_bytes(16, "big")), 0, an_extent(300_000, 1), IDENTITY)
    index.close(clean=True)
    data = tmp_path / "i" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes({
        "garbage": b"\xa5" * len(whole),
        "short": whole[: len(whole) // 2],
        "one page": whole[:4096],
        "zeros": bytes(len(whole)),
    }[damage])
    with pytest.raises(IndexDamaged):
        TierIndex.open(tmp_path / "i", b"boot")


@given(st.binary(max_size=200), st.integers(0, 70_000))
def test_any_bytes_decode_to_something_consistent_or_not_at_all(value, extent_no):
    try:
        extent = record.decode(value, extent_no, 0)
    except record.BadRecord:
        return
    full = blocks.full_mask(extent.size_bytes, extent_no)
    assert extent.present & ~full == 0
    assert extent.zeros & ~extent.present == 0
    assert len(extent.sums) == 8 * full.bit_count()


@given(st.integers(1, 40 << 20), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1), st.integers(0, 4))
def test_a_record_says_what_was_put_into_it(size_bytes, present, zeros, extent_no):
    full = blocks.full_mask(size_bytes, extent_no)
    extent = Extent(size_bytes, full.bit_count())
    extent.present = present & full
    extent.zeros = zeros & extent.present
    value = record.encode(extent, 7, IDENTITY)
    found = record.decode(value, extent_no, 7)
    assert (found.size_bytes, found.present, found.zeros, found.unverified) == (
        size_bytes, extent.present, extent.zeros, 0)
    assert record.decode(value, extent_no, 8).unverified == extent.present
    assert record.allocated_in(value, extent_no) == found.allocated(extent_no)
    assert record.identity_in(value) == ("etag", "v1", "key/ä")


@given(st.integers(0, (1 << 64) - 1))
def test_runs_and_bits_of_a_word(word):
    assert sum(blocks.span_mask(first, count) for first, count in blocks.runs(word)) == word
    assert sum(1 << bit for bit in blocks.bits(word)) == word


@given(st.integers(0, 40 << 20), st.integers(0, 40 << 20))
def test_extent_spans_cover_the_range_once(first, second):
    start, stop = sorted((first, second))
    spans = list(blocks.extent_spans(start, stop))
    assert sum(high - low for _, low, high in spans) == stop - start
    assert all(low // blocks.EXTENT_SIZE_BYTES == number == (high - 1) // blocks.EXTENT_SIZE_BYTES
               for number, low, high in spans)
