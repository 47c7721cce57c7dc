"""Reading S3's answers, none of which is trusted. Pure functions on what botocore parsed.

Raise StoreError for what can be named; KeyError, ValueError and TypeError for an answer that is not of the
promised form (``s3_errors.from_exception`` makes StoreUnavailable of them).
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import unquote, unquote_plus

from tierfs.errors import PreconditionFailed, ShortBody, StoreUnavailable, StoreUnsupported
from tierfs.store.base import ListPage, UnfinishedUpload
from tierfs.types import ObjectInfo

LARGEST_UNASKED_BYTES = 64 * 1024 * 1024
"""How much of a whole object is read and thrown away to get at a range of it."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def plain_etag(value: object) -> str:
    """An ETag without quotes and weakness mark."""
    return str(value or "").removeprefix("W/").strip('"')


def mtime_ns_of(value: object) -> int:
    """Nanoseconds of a parsed Last-Modified."""
    if not isinstance(value, datetime):
        raise TypeError("Last-Modified is missing")
    # Not timestamp() * 1e9: a float has 53 bits.
    return int(value.timestamp()) * 1_000_000_000 + value.microsecond * 1000


def date_ns_of(answer: Mapping[str, Any]) -> int:
    """The server's time of an answer, else this machine's."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return int(email.utils.parsedate_to_datetime(date).timestamp()) * 1_000_000_000
    except (TypeError, ValueError):
        return time.time_ns()


def version_of(answer: Mapping[str, Any]) -> str | None:
    """The version id, None in a bucket without versions."""
    version = answer.get("VersionId")
    return None if version in (None, "", "null") else str(version)


def head_info(key: str, answer: Mapping[str, Any]) -> ObjectInfo:
    metadata = {str(name).lower(): str(value) for name, value in (answer.get("Metadata") or {}).items()}
    return ObjectInfo(key, _size(answer["ContentLength"]), required_etag(key, answer),
                      mtime_ns_of(answer.get("LastModified")), version_of(answer), metadata)


def required_etag(key: str, answer: Mapping[str, Any]) -> str:
    etag = plain_etag(answer.get("ETag"))
    if not etag:
        raise StoreUnavailable(f"{key}: the answer carries no ETag")
    return etag


class KeyDecoder:
    """Undoes ``EncodingType=url`` exactly once, in whichever of its two dialects the server speaks.

    Amazon writes a space as ``+`` and a plus as ``%2B``; others write ``%20`` and leave ``+`` alone. A
    ``%20`` tells them apart, and is remembered.
    """

    def __init__(self) -> None:
        self._plus_is_space = True

    def names(self, answer: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Keys of the objects and the common prefixes of a listing, decoded."""
        keys = [str(entry["Key"]) for entry in answer.get("Contents") or ()]
        prefixes = [str(entry["Prefix"]) for entry in answer.get("CommonPrefixes") or ()]
        return self.decode_all(answer, keys), self.decode_all(answer, prefixes)

    def decode_all(self, answer: Mapping[str, Any], texts: list[str]) -> list[str]:
        if answer.get("EncodingType") != "url":
            return texts
        if self._plus_is_space and any("%20" in text for text in texts):
            self._plus_is_space = False
        decode = unquote_plus if self._plus_is_space else unquote
        return [decode(text) for text in texts]


def list_page(answer: Mapping[str, Any], decoder: KeyDecoder, prefix: str, *, recursive: bool,
              token: str | None) -> ListPage:
    """A page of ListObjectsV2. What lies outside the prefix is dropped: no server may put it there."""
    _require_listing(answer)
    keys, given = decoder.names(answer)
    objects: list[ObjectInfo] = []
    prefixes = {name: None for name in given if name.startswith(prefix) and name.endswith("/")
                and name != prefix}
    for key, entry in zip(keys, answer.get("Contents") or (), strict=True):
        if not key.startswith(prefix):
            continue
        below, slash, _ = key[len(prefix):].partition("/")
        if slash and not recursive:  # this server ignores the delimiter
            prefixes[f"{prefix}{below}/"] = None
            continue
        if key.endswith("/") and not plain_etag(entry.get("ETag")):
            continue  # SeaweedFS shows its own directories so; nobody put an object there
        objects.append(ObjectInfo(key, _size(entry["Size"]), plain_etag(entry["ETag"]),
                                  mtime_ns_of(entry.get("LastModified"))))
    next_token = answer.get("NextContinuationToken") if answer.get("IsTruncated") else None
    if answer.get("IsTruncated") and (not next_token or next_token == token):
        raise StoreUnavailable(f"{prefix or '/'}: list: the listing is cut off and cannot be continued")
    return ListPage(objects, list(prefixes), next_token)


def copied_info(key: str, size_bytes: int, metadata: Mapping[str, str] | None,
                answer: Mapping[str, Any]) -> ObjectInfo:
    """The target of a CopyObject."""
    result = answer["CopyObjectResult"]
    modified = result.get("LastModified")
    return ObjectInfo(key, size_bytes, required_etag(key, result),
                      date_ns_of(answer) if modified is None else mtime_ns_of(modified),
                      version_of(answer), metadata)


def written_info(key: str, size_bytes: int, metadata: Mapping[str, str] | None,
                 answer: Mapping[str, Any]) -> ObjectInfo:
    """The target of a PutObject or CompleteMultipartUpload.

    An answer without an ETag is refused, not made good with a HEAD: that could show the object before.
    """
    return ObjectInfo(key, size_bytes, required_etag(key, answer), date_ns_of(answer), version_of(answer),
                      metadata)


def uploads_page(answer: Mapping[str, Any], decoder: KeyDecoder, prefix: str, marks: Mapping[str, str]
                 ) -> tuple[list[UnfinishedUpload], dict[str, str] | None]:
    """A page of ListMultipartUploads and the markers of the next one, None after the last."""
    _require_listing(answer)
    uploads = answer.get("Uploads") or []
    keys = decoder.decode_all(answer, [str(upload["Key"]) for upload in uploads])
    found = [UnfinishedUpload(key, str(upload["UploadId"]), mtime_ns_of(upload.get("Initiated")))
             for key, upload in zip(keys, uploads, strict=True) if key.startswith(prefix)]
    following: dict[str, str] = {}
    if answer.get("NextKeyMarker"):
        following["KeyMarker"] = decoder.decode_all(answer, [str(answer["NextKeyMarker"])])[0]
    if answer.get("NextUploadIdMarker"):
        following["UploadIdMarker"] = str(answer["NextUploadIdMarker"])
    is_last = not answer.get("IsTruncated") or not following or following == marks
    return found, None if is_last else following


def read_range(key: str, answer: Mapping[str, Any], offset_bytes: int, length_bytes: int,
               if_match: str | None) -> bytes:
    """The body of a ranged GetObject: exactly the bytes asked for, of the version asked for, or an error."""
    body = answer["Body"]
    finished = False
    try:
        skip_bytes, whole = check_range(key, answer, offset_bytes, length_bytes, if_match)
        if whole:
            data: bytes = body.read()
            finished = True
        else:
            data = body.read(skip_bytes + length_bytes)[skip_bytes:]
    finally:
        if not finished:
            body.close()
    if len(data) != length_bytes:
        raise ShortBody(f"{key}: get: {len(data)} of {length_bytes} bytes came")
    return data


def check_range(key: str, answer: Mapping[str, Any], offset_bytes: int, length_bytes: int,
                if_match: str | None) -> tuple[int, bool]:
    """(bytes of the body before those asked for, the body is just those asked for). Raises what is wrong."""
    etag = required_etag(key, answer)  # what carries none is not from the store, but from a proxy
    if if_match is not None and etag != if_match:
        raise PreconditionFailed(f"{key}: is version {etag}, not {if_match}")
    skip_bytes = _bytes_before(key, answer, offset_bytes, length_bytes)
    return skip_bytes, skip_bytes == 0 and answer.get("ContentLength") == length_bytes


def _bytes_before(key: str, answer: Mapping[str, Any], offset_bytes: int, length_bytes: int) -> int:
    """How many bytes of the body come before those asked for."""
    end_bytes = offset_bytes + length_bytes
    given = answer.get("ContentRange")
    if given:  # some servers send it with status 200
        match = _CONTENT_RANGE.fullmatch(str(given))
        if match is None or int(match[1]) != offset_bytes:
            raise StoreUnavailable(f"{key}: get: another range than asked for: {str(given)[:60]}")
        if match[3] != "*" and int(match[3]) < end_bytes:
            raise PreconditionFailed(f"{key}: has {match[3]} bytes, not the {end_bytes} expected")
        if int(match[2]) + 1 != end_bytes:
            raise ShortBody(f"{key}: get: a shorter range than asked for")
        return 0
    size = _size(answer["ContentLength"])
    if size < end_bytes:
        raise PreconditionFailed(f"{key}: has {size} bytes, not the {end_bytes} expected")
    if size - length_bytes > LARGEST_UNASKED_BYTES:
        raise StoreUnsupported(f"{key}: the store answers a range with the whole object of {size} bytes")
    return offset_bytes


def _require_listing(answer: Mapping[str, Any]) -> None:
    """An empty body parses as an empty listing, which would make every file in it disappear."""
    if not any(name in answer for name in ("IsTruncated", "MaxKeys", "KeyCount", "Name", "Bucket")):
        raise ValueError("no listing")


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError("no size")
    return value
