"""Long bodies through boto3, as they come in: where ``s3_plain`` cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tierfs.errors import ShortBody
from tierfs.store.body import Consume
from tierfs.store.s3_answers import check_range

T = TypeVar("T")


def stream_range(key: str, answer: Mapping[str, Any], offset_bytes: int, length_bytes: int,
                 if_match: str | None, consume: Consume[T]) -> T:
    """Hand over the body of a ranged GetObject. Raises as ``s3_answers.read_range`` does."""
    body = answer["Body"]
    finished = False
    try:
        skip_bytes, whole = check_range(key, answer, offset_bytes, length_bytes, if_match)
        if skip_bytes:
            body.read(skip_bytes)
        taken = _Body(key, body, length_bytes)
        result = consume(taken)
        finished = whole and not taken.left_bytes
        return result
    finally:
        if not finished:
            body.close()


class _Body:
    """See ``body.Body``; ``source`` is botocore's StreamingBody."""

    def __init__(self, key: str, source: Any, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self.left_bytes = length_bytes
        self._key = key
        self._source = source

    def readinto(self, buffer: memoryview) -> int:
        if not self.left_bytes:
            return 0
        data: bytes = self._source.read(min(len(buffer), self.left_bytes))
        if not data:
            received = self.length_bytes - self.left_bytes
            raise ShortBody(f"{self._key}: get: {received} of {self.length_bytes} bytes came")
        buffer[: len(data)] = data
        self.left_bytes -= len(data)
        return len(data)

    def descriptor(self) -> None:
        return None
