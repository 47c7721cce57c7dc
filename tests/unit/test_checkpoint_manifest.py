"""The manifest of a checkpoint: what is written, and what is believed of what is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tierfs.checkpoint import manifest
from tierfs.checkpoint.manifest import Manifest, Shard
from tierfs.errors import InvalidArgument, ManifestDamaged

PREFIX, PATH = "team/", b"runs/step-1"
KEY = "team/.tierfs/checkpoints/runs/step-1.json"
semantics = pytest.mark.semantics


def a_shard(file: str, **changes: Any) -> Shard:
    values: dict[str, Any] = {
        "file": file, "key": f"team/runs/step-1/{file}", "size_bytes": 5, "etag": "e", "xxh3_128": "0" * 32,
    }  # fmt: skip
    return Shard(**{**values, **changes})


def a_manifest(*shards: Shard) -> Manifest:
    return Manifest(
        format=manifest.FORMAT, name="runs/step-1", save_id="a" * 32, created_ns=7, step=1, world_size=2,
        shards=shards,
    )  # fmt: skip


def body_with(change: dict[str, Any], shard: dict[str, Any] | None = None) -> bytes:
    body = json.loads(manifest.encode(a_manifest(a_shard("a.pt"))))
    body.update(change)
    body["shards"][0].update(shard or {})
    return json.dumps(body).encode()


def test_what_is_written_can_be_read_again() -> None:
    written = a_manifest(a_shard("a.pt"), a_shard("d/b.pt", rank=1, size_bytes=0))
    assert manifest.manifest_key(PREFIX, PATH) == KEY
    assert manifest.path_of_manifest(PREFIX, KEY) == PATH
    assert manifest.decode(manifest.encode(written), KEY, PREFIX, PATH) == written
    assert written.size_bytes == 5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not readable"),
        (b"{\"format\": 1, \"na", "not readable"),
        (b"\xff\xfe", "not readable"),
        (b"[1]", "not readable"),
        (body_with({"format": 2}), "format 2.*a newer version wrote it"),
        (body_with({"format": 0}), "format 0, and this version of tierfs reads 1"),
        (body_with({"name": "runs/step-2"}), "about 'runs/step-2'"),
        (body_with({"world_size": "x"}), "not readable"),
        (body_with({}, {"file": "../b.pt"}), "not the name of a file"),
        (body_with({}, {"file": "d/../../b.pt"}), "not the name of a file"),
        (body_with({}, {"file": "/etc/passwd"}), "not the name of a file"),
        (body_with({}, {"file": "d//b"}), "not the name of a file"),
        (body_with({}, {"file": "d/"}), "not the name of a file"),
        (body_with({}, {"file": ""}), "not the name of a file"),
        (body_with({}, {"key": "other/secret"}), "'other/secret', outside the checkpoint; not trusted"),
        (body_with({}, {"key": "team/runs/step-1/../x"}), "not trusted"),
        (body_with({}, {"key": "team/runs/step-1/b.pt"}), "not trusted"),
        (body_with({}, {"size_bytes": -1}), "cannot have -1 bytes"),
        (body_with({}, {"size_bytes": 1 << 60}), "cannot have"),
        (body_with({}, {"etag": ""}), "no ETag"),
        (body_with({}, {"xxh3_128": "zz"}), "no checksum"),
    ],
)  # fmt: skip
@semantics(
    "S-CKPT-8",
    "A manifest that cannot be read, has a newer format, or names a key outside its checkpoint is refused with a message that says so.",
)
def test_a_bad_manifest_is_refused_with_its_name(body: bytes, said: str) -> None:
    with pytest.raises(ManifestDamaged, match=said) as caught:
        manifest.decode(body, KEY, PREFIX, PATH)
    assert KEY in str(caught.value)


def test_a_file_is_listed_once() -> None:
    body = manifest.encode(a_manifest(a_shard("a.pt"), a_shard("a.pt")))
    with pytest.raises(ManifestDamaged, match="listed twice"):
        manifest.decode(body, KEY, PREFIX, PATH)


def test_order_is_by_rank_then_by_number() -> None:
    names = [("z.pt", 0), ("rank10.pt", None), ("rank9.pt", None), ("a.pt", 1), ("model-2-of-10/x", None)]
    shards = [a_shard(name, rank=rank) for name, rank in names]
    ordered = [shard.file for shard in manifest.in_rank_order(shards)]
    assert ordered == ["z.pt", "a.pt", "model-2-of-10/x", "rank9.pt", "rank10.pt"]


def test_keys_that_are_no_manifests() -> None:
    for key in ("team/.tierfs/checkpoints/a", "team/a.json", "team/.tierfs/checkpoints/.json",
                "team/.tierfs/checkpoints/a/../b.json", "team/.tierfs/checkpoints/a/.json"):  # fmt: skip
        assert manifest.path_of_manifest(PREFIX, key) is None, key
    assert manifest.path_of_manifest(PREFIX, "team/.tierfs/checkpoints/.tierfs/x.json") is None
    for path in (b"../x", b"a/../x", b"/x", b"a//b", b"a/", b".tierfs/x", b".tierfs"):
        with pytest.raises(InvalidArgument, match="no place for a checkpoint"):
            manifest.manifest_key(PREFIX, path)
    with pytest.raises(InvalidArgument, match="root"):
        manifest.manifest_key(PREFIX, b"")
    with pytest.raises(InvalidArgument, match="too long"):
        manifest.manifest_key(PREFIX, b"/".join([b"x" * 250] * 5))
