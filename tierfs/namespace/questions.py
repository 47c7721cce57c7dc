"""One question at a time about the same thing, and leaving a store alone that does not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar, cast

import structlog
import trio

from tierfs.errors import TransientStoreError

log = structlog.get_logger(__name__)

T = TypeVar("T")

PAUSE_S = 1.0
"""How long after a transient failure every question gets the same failure without being asked."""


class _Question:
    __slots__ = ("done", "error", "result")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None
        self.result: object = None


class Questions:
    """Trio thread only."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._asked: dict[Hashable, _Question] = {}
        self._failure: TransientStoreError | None = None
        self._retry_at_ns = 0

    @property
    def failing(self) -> bool:
        """The last question ended in a transient error of the store."""
        return self._failure is not None

    async def ask(self, key: Hashable, put: Callable[[], Awaitable[T]]) -> T:
        """The answer of ``put()``, or of whoever has been asking the same (``key``) since before.

        Cancelling the wait leaves the question running. Raises what ``put`` raised.
        """
        if self._failure is not None and self._now_ns() < self._retry_at_ns:
            raise self._failure.with_traceback(None)
        question = self._asked.get(key)
        if question is None:
            question = self._asked[key] = _Question()
            # A system task: it belongs to no request, and ends with the engine.
            trio.lowlevel.spawn_system_task(self._run, key, question, put)
        await question.done.wait()
        if question.error is not None:
            # One exception for several tasks: without this its traceback would grow with each of them.
            raise question.error.with_traceback(None)
        return cast(T, question.result)

    async def _run(self, key: Hashable, question: _Question, put: Callable[[], Awaitable[object]]) -> None:
        try:
            question.result = await put()
            self._note_success()
        except TransientStoreError as error:
            self._note_failure(error)
            question.error = error
        except Exception as error:  # everything else is for the waiting requests to report
            question.error = error
        finally:
            del self._asked[key]
            question.done.set()

    def _note_failure(self, error: TransientStoreError) -> None:
        if self._failure is None:
            log.warning("the store does not answer; what is known is served", reason=str(error))
        self._failure = error
        self._retry_at_ns = self._now_ns() + int(PAUSE_S * 1e9)

    def _note_success(self) -> None:
        if self._failure is not None:
            log.info("the store answers again")
        self._failure = None
