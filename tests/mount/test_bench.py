"""``tierfs bench`` on a real mount: cold is cold, the engine's work is counted, and nothing stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.mount import MountFactory, run_cli
from tests.support.weed import ACCESS_KEY, SECRET_KEY, shared_weed, weed_missing
from tierfs.bench import result


def test_a_mount_is_measured_and_left_as_it_was(
    mount_factory: MountFactory, needs_mount: None, tmp_path: Path
) -> None:
    mounted = mount_factory()
    (mounted.path / "theirs").write_text("precious")
    mounted.flush()
    before = mounted.status()["store"]["bytes_read"]
    values, page = tmp_path / "r.json", tmp_path / "r.html"
    mounted.cli(
        "bench", str(mounted.path), "--quick", "--size", "8M", "--time", "100", "--each", "0.1", "--workers", "2",
        "--only", "small-files,checkpoint,restore", "--json", str(values), "--html", str(page),
    )  # fmt: skip
    found = result.read_result(values)
    assert found.target.kind == "tierfs"
    assert found.target.details["source"] == mounted.source
    assert "evicted" in found.cold
    assert not found.notes

    # What was read cold came from the store, all of it and for each time; what was warm did not.
    cold = found.of("small-files", state="cold") + found.of("restore", state="cold")
    assert [one.workload for one in cold] == ["small-files", "restore"]
    assert not [one for one in cold if one.notes], "each was read to its end"
    read = mounted.status()["store"]["bytes_read"] - before
    assert read >= sum(one.bytes for one in cold)

    roles = {"bench", "engine", "front"} if mounted.front == "native" else {"bench", "engine"}
    assert set(cold[0].cpu_s) == roles
    assert sum(one.cpu_s["engine"] for one in found.measurements if "engine" in one.cpu_s) > 0
    (stored,) = [one for one in found.of("checkpoint", until="stored") if one.parameters["workers"] == 2]
    (closed,) = [one for one in found.of("checkpoint", until="close") if one.parameters["workers"] == 2]
    assert stored.bytes == closed.bytes
    assert stored.seconds > closed.seconds
    assert "<svg" in page.read_text()

    assert [path.name for path in mounted.path.iterdir()] == ["theirs"]
    mounted.umount()  # uploads and deletes what is still to go
    assert [path.name for path in mounted.store_dir.iterdir() if path.name != ".tierfs"] == ["theirs"]
    assert (mounted.store_dir / "theirs").read_text() == "precious"


@pytest.mark.skipif(bool(weed_missing()), reason=str(weed_missing()))
def test_a_bucket_is_measured_directly_and_left_as_it_was(tmp_path: Path) -> None:
    import boto3

    server = shared_weed()
    bucket = server.make_bucket()
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    client.put_object(Bucket=bucket, Key="data/theirs", Body=b"precious")
    values = tmp_path / "r.json"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIERFS_", "AWS_"))}
    answer = run_cli(
        "bench", f"s3://{bucket}", "--dir", "data", "--quick", "--size", "80M", "--time", "100", "--each", "0.1", "--workers", "1",
        "--only", "metadata,checkpoint,sequential-read", "--json", str(values),
        "--endpoint-url", server.endpoint_url,
        environment={**kept, **server.environment, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout_s=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    found = result.read_result(values)
    assert (found.target.kind, found.target.name) == ("store", f"s3://{bucket}/data")
    assert {one.workload for one in found.measurements} == {"metadata", "checkpoint", "sequential-read"}
    (saved,) = found.of("checkpoint")
    assert saved.bytes == 20 << 20, "large enough to go in parts"
    listed = client.list_objects_v2(Bucket=bucket)
    assert [entry["Key"] for entry in listed["Contents"]] == ["data/theirs"]
    assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")
    client.close()
