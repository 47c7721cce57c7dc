"""Deleting from an S3 bucket: in batches, and only the version that is meant.

DeleteObjects takes an ETag with each key, DeleteObject an If-Match; Amazon knows both since September 2025.
Whether a server obeys is tried out at the first deletion with an ETag, on a key that does not exist: a server
that obeys says that there is no such object, one that does not know the condition says that it was deleted.
Then batches are sent without ETags, which is what they would mean there.

No server's word that another version is there is taken for it: some say so also of a key that holds nothing.

Source: Amazon S3 user guide, "How to perform conditional deletes".
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from tierfs.errors import ObjectNotFound, PreconditionFailed, StoreConfigError, StoreError, StoreUnsupported
from tierfs.log import get_logger
from tierfs.store.base import DeleteFailure

_log = get_logger(__name__)
T = TypeVar("T")

_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\r\n\t]")
_NO_BATCH_DELETE = ("MissingContentMD5", "MissingContentLength", "MalformedXML")
_BATCH_KEYS = 1000


class Sender(Protocol):
    """Sends one request; raises StoreErrors."""

    def __call__(self, operation: str, key: str, send: Callable[[], T]) -> T: ...


class Deleter:
    """The deletions of one ``S3Store``. ``etag_of`` asks the server, and raises ``ObjectNotFound``."""

    def __init__(self, bucket: str, *, prefix: str, client: Callable[[], Any], request: Sender,
                 etag_of: Callable[[str], str]) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._client = client
        self._request = request
        self._etag_of = etag_of
        self._batches = True
        self.obeys: bool | None = None
        """Whether the server deletes a given version only; None: not tried out yet."""

    def delete(self, key: str, if_match: str | None) -> None:
        """See ``ObjectStore.delete``."""
        if if_match is None:
            self._send(key)
        elif self._obeys_conditions():
            try:
                self._send(key, IfMatch=f'"{if_match}"')
            except ObjectNotFound:
                return
            except PreconditionFailed:
                self._refused(key, if_match)
        else:
            self._delete_by_hand(key, if_match)

    def delete_many(self, keys: Sequence[str], etags: Mapping[str, str]) -> list[DeleteFailure]:
        """See ``ObjectStore.delete_many``."""
        failures: list[DeleteFailure] = []
        batched = [key for key in keys if not _NOT_IN_XML.search(key)]
        single = [key for key in keys if _NOT_IN_XML.search(key)]
        while batched and self._batches:
            batch, batched = batched[:_BATCH_KEYS], batched[_BATCH_KEYS:]
            try:
                failures += self._delete_batch(batch, etags)
            except (StoreUnsupported, StoreConfigError) as error:
                if not _means_no_batches(error):
                    raise
                _log.warning("store cannot delete in batches", bucket=self._bucket, error=str(error))
                self._batches = False
                batched = batch + batched
        for key in single + batched:
            failures += _failures_of(key, partial(self.delete, key, etags.get(key)))
        return failures

    def _delete_batch(self, keys: Sequence[str], etags: Mapping[str, str]) -> list[DeleteFailure]:
        sent = etags if any(key in etags for key in keys) and self._obeys_conditions() else {}
        objects = [{"Key": key, "ETag": f'"{sent[key]}"'} if key in sent else {"Key": key} for key in keys]
        failures: list[DeleteFailure] = []
        for key, code, message in self._send_batch("delete_many", objects):
            if code == "NoSuchKey":
                continue
            if code == "PreconditionFailed" and key in etags:
                failures += _failures_of(key, partial(self._refused, key, etags[key]))
            else:
                failures.append(DeleteFailure(key, f"{code}: {message}"))
        return failures

    def _refused(self, key: str, if_match: str) -> None:
        """The server says that another version is there: raise if so, and delete if it is not so."""
        if self._delete_by_hand(key, if_match):
            _log.warning("store misjudges conditions: deletions go without", bucket=self._bucket, key=key)
            self.obeys = False

    def _delete_by_hand(self, key: str, if_match: str) -> bool:
        """The best that can be done without conditions; a write in between goes unnoticed.

        False: there was nothing to delete.
        """
        try:
            etag = self._etag_of(key)
        except ObjectNotFound:
            return False
        if etag != if_match:
            raise PreconditionFailed(f"{key}: is version {etag}, not {if_match}")
        self._send(key)
        return True

    def _obeys_conditions(self) -> bool:
        if self.obeys is None:
            probe = f"{self._prefix}.tierfs/probe-{secrets.token_hex(8)}"
            try:
                found = {code for _, code, _ in self._send_batch("probe", [{"Key": probe, "ETag": '"0"'}])}
            except (StoreUnsupported, StoreConfigError):
                self.obeys = False
            else:
                if found - {"NoSuchKey", "PreconditionFailed"}:
                    return True  # an accident, which says nothing: ask again next time
                self.obeys = bool(found)
            if not self.obeys:
                _log.warning("store ignores conditions of deletions: what others write to a path that is "
                             "being removed here may be lost", bucket=self._bucket)
        return self.obeys

    def _send(self, key: str, **condition: str) -> None:
        self._request("delete", key, lambda: self._client().delete_object(
            Bucket=self._bucket, Key=key, **condition))

    def _send_batch(self, operation: str, objects: Sequence[Mapping[str, str]]) -> list[tuple[str, str, str]]:
        """(key, code, message) of each object that the server reports as not deleted."""
        answer = self._request(operation, objects[0]["Key"], lambda: self._client().delete_objects(
            Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}))
        return [(str(failed.get("Key", "")), str(failed.get("Code")), str(failed.get("Message")))
                for failed in answer.get("Errors") or ()]


def _failures_of(key: str, delete: Callable[[], None]) -> list[DeleteFailure]:
    try:
        delete()
    except PreconditionFailed as error:
        return [DeleteFailure(key, str(error), replaced=True)]
    except StoreError as error:
        return [DeleteFailure(key, str(error))]
    return []


def _means_no_batches(error: StoreError) -> bool:
    return isinstance(error, StoreUnsupported) or any(code in str(error) for code in _NO_BATCH_DELETE)
