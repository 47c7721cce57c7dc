"""Records of the replica: what is written is read back, and nothing in them is trusted."""

from __future__ import annotations

import msgspec
import pytest

from tierfs.config import load
from tierfs.errors import ConfigError, FormatError
from tierfs.writeback.replica import record as records
from tierfs.writeback.replica.record import FORMAT, ReplicaRecord

SYSTEM = "0" * 31 + "a"
RECORD = ReplicaRecord(
    format=FORMAT, file_system=SYSTEM, source="/store", ino=17, key="d/ü", replaces=None,
    content="ab" * 16, size_bytes=25, mtime_ns=5, copied_ns=6, metadata={"mode": "33188"},
    data_key=f"p/{SYSTEM}/17-00.data", data_etag="e", part_bytes=10, digests=["a", "b", "c"],
)  # fmt: skip
AT = f"p/{SYSTEM}/17.json"


def test_what_is_written_is_read_back() -> None:
    assert records.record_key("p/", SYSTEM, 17) == AT
    assert records.decode(records.encode(RECORD), AT, "p/") == RECORD
    assert [RECORD.part(number) for number in range(3)] == [(0, 10), (10, 10), (20, 5)]
    assert records.is_record(AT)
    assert not records.is_record(RECORD.data_key)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": FORMAT + 1}, "newer than this tierfs"),
        ({"file_system": "../../x"}, "file_system"),
        ({"key": "../outside"}, "key: "),
        ({"key": ""}, "key: "),
        ({"size_bytes": -1}, "size_bytes"),
        ({"size_bytes": 1 << 60}, "size_bytes"),
        ({"part_bytes": 0}, "part_bytes"),
        ({"digests": ["a"]}, "digests"),
        ({"data_key": "elsewhere/17.data"}, "data_key"),
        ({"data_key": f"p/{SYSTEM}/../x"}, "data_key"),
        ({"ino": 18}, "another key"),
    ],
)
def test_nothing_in_a_record_is_trusted(changes: dict[str, object], says: str) -> None:
    raw = records.encode(msgspec.structs.replace(RECORD, **changes))
    with pytest.raises(FormatError, match=says) as caught:
        records.decode(raw, AT, "p/")
    assert AT in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"format": 1}', b"\xff"])
def test_what_is_no_record_is_told(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"17\.json: not a record"):
        records.decode(raw, AT, "p/")


@pytest.mark.parametrize(
    ("replica", "says"),
    [
        ("s3://bucket/data/below", "overlap"),
        ("s3://bucket", "overlap"),
        ("s3://bucket/data", "overlap"),
        ("/mnt/x/replica", "overlap"),
        ("ftp://x", "SOURCE is"),
    ],
)
def test_a_replica_is_somewhere_else(replica: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load({"source": "s3://bucket/data", "mountpoint": "/mnt/x", "replica": replica}, environ={})
    assert "replica" in str(caught.value)


def test_a_replica_elsewhere_is_taken() -> None:
    given = {"source": "s3://bucket/data", "mountpoint": "/mnt/x"}
    for replica in ("s3://bucket/other", "s3://flash/data", "/flash"):
        assert load(given | {"replica": replica}, environ={}).replica == replica
    elsewhere = load(
        given | {"replica": "s3://bucket/data", "replica_endpoint_url": "http://other:9000"}, environ={}
    )
    assert elsewhere.replica_endpoint_url == "http://other:9000"
    with pytest.raises(ConfigError, match="there is no replica"):
        load(given | {"replica_endpoint_url": "http://other:9000"}, environ={})
