"""An S3 bucket as an object store: with boto3, with obstore for small reads, and by ourselves for long ones.

Works with Amazon S3 and with servers that imitate it, which differ in more than they document: see
``s3_answers`` (ranges answered with whole objects, two ways to encode keys), ``s3_client`` (checksums) and
``s3_errors`` (codes). Whether a server obeys conditions is tried out at the first conditional write, with a
request that a server which obeys them refuses: If-Match on a key that does not exist. Deletions are in
``s3_deletes``.

Every method sends its requests once; ``retry`` repeats them.
"""

from __future__ import annotations

import mimetypes
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tierfs.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StoreAccessDenied,
    StoreConfigError,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    StoreUnsupported,
    TransientStoreError,
)
from tierfs.log import get_logger
from tierfs.metrics import Metrics
from tierfs.store import s3_answers as answers
from tierfs.store.base import (
    LIST_PAGE_KEYS,
    MAX_SINGLE_COPY_BYTES,
    UNCONDITIONAL,
    Buffer,
    Condition,
    DeleteFailure,
    ListPage,
    Part,
    StoreCapabilities,
    UnfinishedUpload,
    lower_names,
    part_size_for,
)
from tierfs.store.body import Consume
from tierfs.store.counting import RequestMeter
from tierfs.store.prepared import PreparedGet
from tierfs.store.s3_client import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, Clients, Connection
from tierfs.store.s3_deletes import Deleter
from tierfs.store.s3_errors import from_exception
from tierfs.store.s3_fast import FastPathUnusable
from tierfs.store.s3_stream import stream_range
from tierfs.types import ObjectInfo

_log = get_logger(__name__)
T = TypeVar("T")

_CHECK_HINTS: tuple[tuple[type[StoreError], str], ...] = (
    (StoreAccessDenied, "; check the credentials, and that they allow to list this bucket and prefix"),
    (StoreTimeout, "; check the endpoint URL, the network and the proxy"),
    (StoreUnavailable, "; check the endpoint URL, the network and the proxy"),
)

_FAST_REFUSALS = 3  # in a row, before the fast path is given up: one may be a proxy's mistake
_COPY_PART_BYTES = 512 * 1024 * 1024
_KEPT_HEADERS = ("CacheControl", "ContentDisposition", "ContentEncoding", "ContentLanguage", "ContentType",
                 "StorageClass")


class S3Store:
    """See the module docstring; the contract is ``base.ObjectStore``. Sends nothing until it is used."""

    def __init__(self, bucket: str, *, prefix: str = "", endpoint_url: str | None = None,
                 region: str | None = None, profile: str | None = None, connections: int = 48,
                 connect_timeout_s: float = CONNECT_TIMEOUT_S, read_timeout_s: float = READ_TIMEOUT_S,
                 use_fast_path: bool = True, max_single_copy_bytes: int = MAX_SINGLE_COPY_BYTES,
                 metrics: Metrics | None = None) -> None:
        """``prefix`` is only what ``check`` lists and what ``url`` shows."""
        self._bucket = bucket
        self._prefix = prefix
        self._max_single_copy_bytes = max_single_copy_bytes
        self._connection = Connection(
            bucket, endpoint_url=endpoint_url, region=region, profile=profile, connections=connections,
            connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s, use_fast_path=use_fast_path)
        self._meter = RequestMeter(metrics)
        self.counts = self._meter.counts
        self._fast_refusals = 0
        self._decoder = answers.KeyDecoder()
        self._conditional_put: bool | None = None
        self._conditional_copy: bool | None = None
        self._keeps_markers: bool | None = None
        self._deleter = Deleter(bucket, prefix=prefix, client=lambda: self._client, request=self._request,
                                etag_of=lambda key: self.head(key).etag)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def capabilities(self) -> StoreCapabilities:
        """What is known so far: conditions count as obeyed until a probe has shown otherwise."""
        return StoreCapabilities(
            conditional_put=self._conditional_put is not False,
            conditional_copy=self._conditional_copy is not False,
            conditional_delete=self._deleter.obeys is not False,
            part_copy=True,
            keeps_directory_markers=self._keeps_markers is not False,
        )

    def refresh_credentials(self) -> None:
        try:
            self._connection.refresh()
        except Exception as error:
            raise from_exception(error, "", "refresh_credentials") from error

    def close(self) -> None:
        self._connection.close()

    def check(self) -> None:
        try:
            self.list_page(self._prefix, limit=1)
        except StoreError as error:
            hint = next((text for kind, text in _CHECK_HINTS if isinstance(error, kind)), "")
            told = type(error)(f"{self.url} at {self._connection.endpoint_url}: {error}{hint}")
            if isinstance(error, TransientStoreError) and isinstance(told, TransientStoreError):
                told.retry_after_s = error.retry_after_s
            raise told from None

    # Reading

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = LIST_PAGE_KEYS
    ) -> ListPage:
        arguments: dict[str, Any] = {
            "Prefix": prefix, "MaxKeys": max(1, min(limit, LIST_PAGE_KEYS)), "EncodingType": "url"}
        if not recursive:
            arguments["Delimiter"] = "/"
        if token is not None:
            arguments["ContinuationToken"] = token
        return self._request("list", prefix, lambda: answers.list_page(
            self._client.list_objects_v2(Bucket=self._bucket, **arguments), self._decoder, prefix,
            recursive=recursive, token=token))

    def head(self, key: str) -> ObjectInfo:
        return self._head(key, lambda answer: answers.head_info(key, answer))

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *,
                  if_match: str | None = None, version_id: str | None = None) -> bytes:
        if length_bytes <= 0:
            return b""
        clients = self._reading_clients(key)
        fast = clients.fast
        if fast is not None and fast.suits(key, length_bytes):
            try:
                data = self._request("get", key, lambda: fast.get(
                    key, offset_bytes, length_bytes, if_match=if_match, version_id=version_id))
            except FastPathUnusable as unusable:
                self._note_unusable(unusable)
            else:
                self._fast_refusals = 0
                self._meter.note_read(length_bytes)
                return data
        data = self._request("get", key, lambda: answers.read_range(
            key, self._get_object(key, offset_bytes, length_bytes, if_match, version_id),
            offset_bytes, length_bytes, if_match))
        self._meter.note_read(length_bytes)
        return data

    def stream(self, key: str, offset_bytes: int, length_bytes: int, consume: Consume[T], *,
               if_match: str | None = None, version_id: str | None = None) -> T:
        plain = self._reading_clients(key).plain_http
        if plain is not None:
            result = self._request("get", key, lambda: plain.stream(
                key, offset_bytes, length_bytes, consume, if_match=if_match, version_id=version_id))
        else:
            result = self._request("get", key, lambda: stream_range(
                key, self._get_object(key, offset_bytes, length_bytes, if_match, version_id),
                offset_bytes, length_bytes, if_match, consume))
        self._meter.note_read(length_bytes)
        return result

    def prepare_get(self, key: str, offset_bytes: int, length_bytes: int, *, etag: str | None = None,
                    version_id: str | None = None) -> PreparedGet | None:
        """See ``prepared``."""
        clients = self._connection.known_clients
        if clients is None or clients.prepared is None:
            return None
        return clients.prepared.prepare(key, offset_bytes, length_bytes, etag=etag, version_id=version_id,
                                        meter=self._meter)

    def _reading_clients(self, key: str) -> Clients:
        """And the next request may be a prepared one again."""
        clients = self._clients("get", key)
        if clients.prepared is not None:
            try:
                clients.prepared.renew()
            except Exception as error:
                raise from_exception(error, key, "get") from None
        return clients

    def _get_object(self, key: str, offset_bytes: int, length_bytes: int, if_match: str | None,
                    version_id: str | None) -> Any:
        arguments: dict[str, Any] = {"Range": f"bytes={offset_bytes}-{offset_bytes + length_bytes - 1}"}
        if if_match is not None:
            arguments["IfMatch"] = f'"{if_match}"'
        if version_id is not None:
            arguments["VersionId"] = version_id
        return self._client.get_object(Bucket=self._bucket, Key=key, **arguments)

    # Writing

    def put(self, key: str, body: Buffer, *, metadata: Mapping[str, str] | None = None,
            condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        data = body if isinstance(body, bytes | bytearray) else bytes(body)
        headers = self._condition_headers(key, condition)
        try:
            stored = self._request("put", key, lambda: answers.written_info(
                key, len(data), lower_names(metadata), self._client.put_object(
                    Bucket=self._bucket, Key=key, Body=data, Metadata=_user_metadata(key, metadata),
                    **_content_type(key), **headers)), written_bytes=len(data))
        except ObjectNotFound as error:  # Amazon's answer to If-Match where there is nothing
            raise PreconditionFailed(str(error)) from None
        if key.endswith("/") and metadata and self._keeps_markers is None:
            self._keeps_markers = self.head(key).metadata == lower_names(metadata)
        return stored

    def copy(self, source: ObjectInfo, target_key: str, *, metadata: Mapping[str, str] | None = None,
             condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        if source.size_bytes > self._max_single_copy_bytes:
            return self._copy_in_parts(source, target_key, metadata, condition)
        arguments: dict[str, Any] = {"CopySourceIfMatch": f'"{source.etag}"'}
        if metadata is None and source.key == target_key:
            metadata = self.head(source.key).metadata  # S3 refuses a copy onto itself that changes nothing
        if metadata is not None:
            arguments |= {"MetadataDirective": "REPLACE", "Metadata": _user_metadata(target_key, metadata),
                          **self._kept_headers(source.key)}
        arguments |= self._copy_condition_headers(source, target_key, condition)
        kept = source.metadata if metadata is None else lower_names(metadata)
        return self._request("copy", target_key, lambda: answers.copied_info(
            target_key, source.size_bytes, kept, self._patient.copy_object(
                Bucket=self._bucket, Key=target_key, CopySource=self._source(source), **arguments)))

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._deleter.delete(key, if_match)

    def delete_many(self, keys: Sequence[str], etags: Mapping[str, str] | None = None
                    ) -> Sequence[DeleteFailure]:
        return self._deleter.delete_many(keys, etags or {})

    # Multipart

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        return self._start_multipart(key, metadata, _content_type(key))

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        data = body if isinstance(body, bytes | bytearray) else bytes(body)
        return self._request("upload_part", key, lambda: Part(number, answers.required_etag(
            key, self._client.upload_part(
                Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=data)),
            len(data)), written_bytes=len(data))

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo,
                  offset_bytes: int, length_bytes: int) -> Part:
        return self._request("copy_part", key, lambda: Part(number, answers.required_etag(
            key, self._patient.upload_part_copy(
                Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumber=number,
                CopySource=self._source(source), CopySourceIfMatch=f'"{source.etag}"',
                CopySourceRange=f"bytes={offset_bytes}-{offset_bytes + length_bytes - 1}",
            )["CopyPartResult"]), length_bytes))

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part], *,
                           condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        headers = self._condition_headers(key, condition)
        listed = [{"PartNumber": part.number, "ETag": f'"{part.etag}"'} for part in parts]
        size_bytes = sum(part.size_bytes for part in parts)
        return self._request("complete_multipart", key, lambda: answers.written_info(
            key, size_bytes, None, self._patient.complete_multipart_upload(
                Bucket=self._bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed},
                **headers)))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        try:
            self._request("abort_multipart", key, lambda: self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=key, UploadId=upload_id))
        except ObjectNotFound:
            return

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        found: list[UnfinishedUpload] = []
        marks: dict[str, str] | None = {}
        while marks is not None:
            uploads, marks = self._uploads_page(prefix, marks)
            found += uploads
        return found

    def _uploads_page(self, prefix: str, marks: dict[str, str]
                      ) -> tuple[list[UnfinishedUpload], dict[str, str] | None]:
        return self._request("list_uploads", prefix, lambda: answers.uploads_page(
            self._client.list_multipart_uploads(
                Bucket=self._bucket, Prefix=prefix, EncodingType="url", **marks),
            self._decoder, prefix, marks))

    # How requests are sent

    @property
    def _client(self) -> Any:
        return self._connection.clients().plain

    @property
    def _patient(self) -> Any:
        return self._connection.clients().patient

    def _request(self, operation: str, key: str, send: Callable[[], T], *, written_bytes: int = 0) -> T:
        """Send one request; whatever it raises becomes a StoreError that names the key."""
        self._meter.note(operation, written_bytes=written_bytes)
        try:
            return send()
        except FastPathUnusable:
            raise
        except Exception as error:
            failure = from_exception(error, key, operation)
            if isinstance(failure, StoreAccessDenied) and self._is_anonymous():
                failure = StoreAccessDenied(
                    f"{failure}; no credentials were found, so the request was not signed")
            raise failure from None

    def _note_unusable(self, unusable: FastPathUnusable) -> None:
        if unusable.is_servers_way:
            self._fast_refusals += 1
            if self._fast_refusals >= _FAST_REFUSALS:
                self._connection.drop_fast_path(str(unusable))

    def _is_anonymous(self) -> bool:
        try:
            return self._connection.clients().is_anonymous
        except Exception:
            return False

    def _clients(self, operation: str, key: str) -> Clients:
        try:
            return self._connection.clients()
        except Exception as error:
            raise from_exception(error, key, operation) from None

    def _head(self, key: str, read: Callable[[dict[str, Any]], T]) -> T:
        try:
            return self._request("head", key, lambda: read(
                self._client.head_object(Bucket=self._bucket, Key=key)))
        except (StoreAccessDenied, StoreConfigError, StoreUnavailable) as error:
            # A HEAD has no body, so an expired token looks like a bad request: ask for the reason.
            if isinstance(error, StoreAccessDenied) or f"{key}: head: 400" in str(error):
                self.list_page(key, limit=1)
            raise

    def _source(self, source: ObjectInfo) -> dict[str, str]:
        where = {"Bucket": self._bucket, "Key": source.key}
        return where if source.version_id is None else where | {"VersionId": source.version_id}

    def _kept_headers(self, key: str) -> dict[str, str]:
        """Headers that a copy with new metadata would otherwise lose."""
        return self._head(key, lambda answer: {
            name: str(answer[name]) for name in _KEPT_HEADERS if answer.get(name)})

    def _start_multipart(
        self, key: str, metadata: Mapping[str, str] | None, headers: Mapping[str, str]
    ) -> str:
        return self._request("start_multipart", key, lambda: str(self._client.create_multipart_upload(
            Bucket=self._bucket, Key=key, Metadata=_user_metadata(key, metadata), **headers)["UploadId"]))

    def _copy_in_parts(self, source: ObjectInfo, target_key: str, metadata: Mapping[str, str] | None,
                       condition: Condition) -> ObjectInfo:
        kept = metadata if metadata is not None else self.head(source.key).metadata
        upload_id = self._start_multipart(target_key, kept, self._kept_headers(source.key))
        part_bytes = part_size_for(source.size_bytes, min(_COPY_PART_BYTES, self._max_single_copy_bytes))
        try:
            parts = [
                self.copy_part(target_key, upload_id, number, source, offset,
                               min(part_bytes, source.size_bytes - offset))
                for number, offset in enumerate(range(0, source.size_bytes, part_bytes), start=1)
            ]
            return self.complete_multipart(target_key, upload_id, parts, condition=condition)
        except BaseException:
            try:
                self.abort_multipart(target_key, upload_id)
            except StoreError as error:
                _log.warning("upload not aborted", key=target_key, error=str(error))
            raise

    # Conditions

    def _condition_headers(self, key: str, condition: Condition) -> dict[str, str]:
        if condition == UNCONDITIONAL:
            return {}
        if self._conditional_put is None:
            self._conditional_put = self._obeys(lambda probe: self._request(
                "probe", probe, lambda: self._client.put_object(
                    Bucket=self._bucket, Key=probe, Body=b"", IfMatch='"0"')))
        if self._conditional_put is False:
            self._check_by_hand(key, condition)
            return {}
        return _headers(condition)

    def _copy_condition_headers(self, source: ObjectInfo, key: str, condition: Condition) -> dict[str, str]:
        if condition == UNCONDITIONAL:
            return {}
        if self._conditional_copy is None:
            shape = self._client.meta.service_model.operation_model("CopyObject").input_shape
            self._conditional_copy = "IfNoneMatch" in shape.members and self._obeys(
                lambda probe: self._request("probe", probe, lambda: self._client.copy_object(
                    Bucket=self._bucket, Key=probe, CopySource=self._source(source), IfMatch='"0"')))
        if self._conditional_copy is False:
            self._check_by_hand(key, condition)
            return {}
        return _headers(condition)

    def _obeys(self, write: Callable[[str], object]) -> bool | None:
        """Whether a conditional write that must fail does; None if that could not be found out."""
        probe = f"{self._prefix}.tierfs/probe-{secrets.token_hex(8)}"
        try:
            write(probe)
        except (PreconditionFailed, ObjectNotFound):
            return True
        except StoreUnsupported:
            return False
        except StoreError:
            return None
        self.delete(probe)
        _log.warning("store ignores conditions: writers on several nodes may overwrite each other",
                     store=self.url)
        return False

    def _check_by_hand(self, key: str, condition: Condition) -> None:
        """The best that can be done without conditions; a write in between goes unnoticed."""
        try:
            etag = self.head(key).etag
        except ObjectNotFound:
            if condition.if_match is not None:
                raise PreconditionFailed(f"{key}: does not exist") from None
            return
        if condition.if_absent or (condition.if_match is not None and condition.if_match != etag):
            raise PreconditionFailed(f"{key}: is version {etag}")


def _headers(condition: Condition) -> dict[str, str]:
    if condition.if_absent:
        return {"IfNoneMatch": "*"}
    return {"IfMatch": f'"{condition.if_match}"'}


def _user_metadata(key: str, metadata: Mapping[str, str] | None) -> dict[str, str]:
    found = lower_names(metadata)
    if not all(name.isascii() and value.isascii() and value.isprintable() for name, value in found.items()):
        raise StoreConfigError(f"{key}: S3 metadata must be printable ASCII")
    return found


def _content_type(key: str) -> dict[str, str]:
    kind, _ = mimetypes.guess_type(key.rpartition("/")[2])
    return {"ContentType": kind} if kind else {}
