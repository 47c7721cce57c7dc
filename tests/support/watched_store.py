"""A store whose requests a test can hold back, delay and look at. Called from worker threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierfs.store.base import ObjectStore

WRITES = {"put": 0, "copy": 1, "complete_multipart": 0, "delete": 0}
"""Position of the target key among the arguments."""


@dataclass(slots=True)
class Hold:
    """One request that waits, before it does anything or before it answers."""

    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self.reached.set()
        assert self.go.wait(20)


class WatchedStore:
    """``before`` and ``after`` are called around every request that changes something: (operation, key)."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._holds: dict[tuple[str, str, bool], Hold] = {}
        self._idle = threading.Condition()
        self._under_way = 0
        self.before: Callable[[str, str], None] = lambda operation, key: None
        self.after: Callable[[str, str], None] = lambda operation, key: None

    def hold(self, operation: str, key: str, *, done: bool = False) -> Hold:
        """The next such request waits for ``go``; ``done``: when it has been carried out."""
        hold = self._holds[operation, key, done] = Hold()
        return hold

    def _wait(self, operation: str, key: str, *, done: bool) -> None:
        hold = self._holds.pop((operation, key, done), None)
        if hold is not None:
            hold.wait()

    def wait_until_idle(self) -> None:
        """Until no request is under way: those of an engine that is gone may still be."""
        with self._idle:
            assert self._idle.wait_for(lambda: not self._under_way, timeout=20)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)
        if name not in WRITES and name != "delete_many":
            return function

        def watched(*args: Any, **kwargs: Any) -> Any:
            keys: Sequence[str] = args[0] if name == "delete_many" else [args[WRITES[name]]]
            operation = "delete" if name == "delete_many" else name
            with self._idle:
                self._under_way += 1
            try:
                for key in keys:
                    self._wait(operation, key, done=False)
                    self.before(operation, key)
                result = function(*args, **kwargs)
                for key in keys:
                    self._wait(operation, key, done=True)
                    self.after(operation, key)
                return result
            finally:
                with self._idle:
                    self._under_way -= 1
                    self._idle.notify_all()

        return watched
