"""The mount on a real S3 server (SeaweedFS)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import tierfs.checkpoint
from tests.support.mount import Mounted, MountFactory, files_below, wait_until
from tests.support.sequence import RandomOperations, Replica, tree_state
from tests.support.weed import ACCESS_KEY, SECRET_KEY, shared_weed, weed_missing

pytestmark = [
    pytest.mark.usefixtures("needs_mount"),
    pytest.mark.needs_fuse,
    pytest.mark.skipif(bool(weed_missing()), reason=str(weed_missing())),
]
MIB = 1 << 20


class Bucket:
    """A new bucket, and a client that goes to it directly."""

    def __init__(self) -> None:
        import boto3
        from botocore.config import Config

        self.server = shared_weed()
        self.name = self.server.make_bucket()
        self.client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.server.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(retries={"total_max_attempts": 5}),
        )

    def settings(self, *options: str, prefix: str = "") -> dict[str, Any]:
        """For ``MountFactory``."""
        return {
            "source": f"s3://{self.name}{prefix}",
            "options": ("--endpoint-url", self.server.endpoint_url, *options),
            "environment": self.server.environment,
        }

    def put(self, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=body)

    def get(self, key: str) -> bytes:
        with self.client.get_object(Bucket=self.name, Key=key)["Body"] as body:
            return bytes(body.read())

    def keys(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return sorted(found["Key"] for page in pages for found in page.get("Contents", []))

    def unfinished(self) -> list[dict[str, Any]]:
        return list(self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", []))


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    bucket = Bucket()
    yield bucket
    bucket.client.close()


def test_read_write_list_remove(mount_factory: MountFactory, bucket: Bucket) -> None:
    bucket.put("d/e/f", b"from outside")
    bucket.put("top", b"t" * 300_000)
    mounted = mount_factory(**bucket.settings())
    assert sorted(os.listdir(mounted.path)) == ["d", "top"]
    assert (mounted.path / "d" / "e" / "f").read_bytes() == b"from outside"
    assert (mounted.path / "top").read_bytes() == b"t" * 300_000
    (mounted.path / "d" / "new").write_bytes(b"from inside")
    os.unlink(mounted.path / "top")
    os.rename(mounted.path / "d" / "e" / "f", mounted.path / "d" / "g")
    mounted.flush()
    assert bucket.get("d/new") == b"from inside"
    assert bucket.get("d/g") == b"from outside"
    assert not {"top", "d/e/f"} & set(bucket.keys())


def test_prefix_is_all_that_is_touched(mount_factory: MountFactory, bucket: Bucket) -> None:
    bucket.put("other", b"1")
    bucket.put("pre", b"2")
    bucket.put("prefix2/f", b"3")
    bucket.put("pre/fix/f", b"mine")
    mounted = mount_factory(**bucket.settings(prefix="/pre/fix"))
    assert os.listdir(mounted.path) == ["f"]
    (mounted.path / "g").write_bytes(b"new")
    os.unlink(mounted.path / "f")
    mounted.umount()
    keys = set(bucket.keys())
    assert {"other", "pre", "prefix2/f", "pre/fix/g"} <= keys
    assert "pre/fix/f" not in keys
    assert all(key.startswith("pre/fix/") for key in keys - {"other", "pre", "prefix2/f"})


def test_multipart_and_large_reads(mount_factory: MountFactory, bucket: Bucket) -> None:
    mounted = mount_factory(**bucket.settings("--part-size", "5M"))
    data = os.urandom(23 * MIB + 17)
    (mounted.path / "big").write_bytes(data)
    mounted.flush()
    assert hashlib.sha256(bucket.get("big")).digest() == hashlib.sha256(data).digest()
    assert bucket.unfinished() == []
    bucket.put("big2", data)
    wait_until(lambda: (mounted.path / "big2").exists(), "the object put by others", 30)
    assert (mounted.path / "big2").read_bytes() == data


def test_change_in_the_middle_of_a_large_file(mount_factory: MountFactory, bucket: Bucket) -> None:
    data = bytearray(os.urandom(18 * MIB))
    bucket.put("f", bytes(data))
    mounted = mount_factory(**bucket.settings("--part-size", "5M"))
    handle = os.open(mounted.path / "f", os.O_RDWR)
    os.pwrite(handle, b"changed", 9 * MIB + 3)
    data[9 * MIB + 3 : 9 * MIB + 10] = b"changed"
    os.close(handle)
    mounted.flush()
    assert bucket.get("f") == bytes(data)
    mounted.remount()
    assert (mounted.path / "f").read_bytes() == bytes(data)


def test_metadata_as_other_tools_expect_them(mount_factory: MountFactory, bucket: Bucket) -> None:
    """The names under which s3fs and rclone keep mode, owner and time."""
    mounted = mount_factory(**bucket.settings())
    (mounted.path / "f").write_bytes(b"x")
    os.chmod(mounted.path / "f", 0o640)
    os.utime(mounted.path / "f", ns=(10**18, 10**18 + 5))
    mounted.flush()
    found = bucket.client.head_object(Bucket=bucket.name, Key="f")["Metadata"]
    assert int(found["mode"]) == 0o100640
    assert float(found["mtime"]) == pytest.approx(10**9)
    assert int(found["uid"]) == os.geteuid()


def test_random_operations_end_up_in_the_bucket(
    mount_factory: MountFactory, bucket: Bucket, base_dir: Any
) -> None:
    mounted = mount_factory(**bucket.settings("--upload-delay", "0.2"))
    plain = base_dir / "plain"
    plain.mkdir()
    here, there = Replica(mounted.path), Replica(plain)
    for operation in islice(RandomOperations(99), 400):
        assert here.perform(operation) == there.perform(operation), operation
    here.close_handles()
    there.close_handles()
    assert tree_state(mounted.path) == tree_state(plain)
    mounted.remount()
    assert tree_state(mounted.path) == tree_state(plain)
    mounted.umount()
    expected = {
        str(p.relative_to(plain)): p.read_bytes()
        for p in plain.rglob("*")
        if p.is_file() and not p.is_symlink()
    }
    found = {key: bucket.get(key) for key in expected}
    assert found == expected


def test_c15_kill_during_a_multipart_upload(mount_factory: MountFactory, bucket: Bucket) -> None:
    mounted: Mounted = mount_factory(
        **bucket.settings("--part-size", "5M", "--upload-delay", "0", "--upload-concurrency", "1")
    )
    mounted.fail({"kind": "latency", "operation": "upload_part", "seconds": 0.4})
    data = os.urandom(31 * MIB)
    (mounted.path / "f").write_bytes(data)
    wait_until(lambda: bool(bucket.unfinished()), "an upload in progress")
    mounted.kill9()
    mounted.heal()
    mounted.start()
    mounted.flush()
    assert bucket.get("f") == data
    wait_until(lambda: bucket.unfinished() == [], "the end of the orphaned upload")


def test_bucket_that_does_not_exist(mount_factory: MountFactory, bucket: Bucket) -> None:
    settings = bucket.settings()
    settings["source"] = "s3://no-such-bucket-here"
    mounted = mount_factory.prepare(**settings)
    with pytest.raises(AssertionError, match="no-such-bucket-here"):
        mounted.start()


def test_wrong_credentials(mount_factory: MountFactory, bucket: Bucket) -> None:
    settings = bucket.settings()
    settings["environment"] = {**settings["environment"], "AWS_SECRET_ACCESS_KEY": "wrong"}
    mounted = mount_factory.prepare(**settings)
    with pytest.raises(AssertionError, match=r"(?i)denied|credential|403|signature"):
        mounted.start()


def test_a_checkpoint_is_what_its_manifest_says(
    one_front: None, mount_factory: MountFactory, bucket: Bucket
) -> None:
    mounted = mount_factory(**bucket.settings(prefix="/team"))
    data = {"rank0.pt": os.urandom(17 * MIB), "rank1.pt": os.urandom(1000), "d/empty": b""}
    with tierfs.checkpoint.save(mounted.path / "runs" / "step-1", step=1) as directory:
        (directory / "d").mkdir()
        for name, content in data.items():
            (directory / name).write_bytes(content)
    tierfs.checkpoint.wait(mounted.path / "runs" / "step-1", timeout_s=90)
    known = json.loads(bucket.get("team/.tierfs/checkpoints/runs/step-1.json"))
    found = {shard["key"]: shard["size_bytes"] for shard in known["shards"]}
    assert found == {f"team/runs/step-1/{name}": len(content) for name, content in data.items()}
    (listed,) = mounted.json("checkpoint", "list")["checkpoints"]
    assert (listed["path"], listed["state"]) == ("runs/step-1", "in the store"), listed
    mounted.cli("checkpoint", "verify", str(mounted.path / "runs" / "step-1"), "--full")
    other = mount_factory(**bucket.settings(prefix="/team"))
    lists = other.status()["store"]["requests"].get("list", 0)
    other.cli("checkpoint", "restore", str(other.path / "runs" / "step-1"), "--wait")
    requests = other.status()["store"]["requests"]
    assert requests.get("list", 0) == lists
    for name, content in data.items():
        assert (other.path / "runs" / "step-1" / name).read_bytes() == content


def test_snapshot(mount_factory: MountFactory, bucket: Bucket) -> None:
    """Copies on the server, of an object that was put in parts as well: its copy has another ETag."""
    mounted = mount_factory(**bucket.settings("--part-size", "5MiB", prefix="/top"))
    written = {"small": b"small", "large": os.urandom(11 * MIB), "moved": b"moved", "same": b"same"}
    for name, data in written.items():
        (mounted.path / name).write_bytes(data)
    made = mounted.json("snapshot", "create", str(mounted.path), "--name", "one")["snapshot"]
    (mounted.path / "small").write_bytes(b"other")
    os.unlink(mounted.path / "large")
    os.rename(mounted.path / "moved", mounted.path / "elsewhere")
    mounted.flush()
    assert bucket.get("top/small") == b"other"
    found = bucket.keys()
    assert len([key for key in found if key.startswith("top/.tierfs/snapshots/")]) == 2
    mounted.json("evict", str(mounted.path))
    earlier = mounted.status()["store"]["requests"]
    restored = mounted.json("snapshot", "restore", str(mounted.path), "--name", "one", "--no-backup")
    assert (restored["made"], restored["replaced"], restored["removed"]) == (2, 1, 1)
    mounted.json("snapshot", "clone", "one", str(mounted.path / "copy"))
    mounted.flush()
    later = mounted.status()["store"]["requests"]
    assert [later.get(name, 0) - earlier.get(name, 0) for name in ("get", "upload_part")] == [0, 0]
    assert later["copy"] > earlier["copy"]
    for name, data in written.items():
        assert bucket.get(f"top/{name}") == bucket.get(f"top/copy/{name}") == data
    assert files_below(mounted.path / "copy") == written
    assert files_below(Path(made["location"])) == written
    for name in ("copy/small", "copy/large", "copy/moved", "copy/same", "large", "moved"):
        os.unlink(mounted.path / name)
    os.rmdir(mounted.path / "copy")
    mounted.flush()
    mounted.json("snapshot", "delete", str(mounted.path), "--name", "one")
    wait_until(
        lambda: bucket.keys() == ["top/same", "top/small"], "the copies to be deleted"
    )
