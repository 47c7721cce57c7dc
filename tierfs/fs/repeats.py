"""Requests that come twice: the engine before this one had done them, and died before it could say so.

A native front keeps every request until its answer has come, and sends it again to the next engine. Reading
twice does no harm; making a name twice would be a false EEXIST, removing one a false ENOENT. So a request
that changes names carries a number, which is committed in the same transaction as the change. An engine that
gets a number which is there answers as the one before would have.

Numbers count up, and no more than ``KEPT`` requests wait for an answer at once, so older ones are forgotten
as new ones come. Trio thread only. With the Python front there are no numbers: 0.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from tierfs.namespace import repeats
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction

T = TypeVar("T")
DIE_AFTER_COMMIT = os.environ.get("TIERFS_TEST_DIE_AFTER_COMMIT")
"""For tests: if a file of that name exists, the next numbered change is the last thing this engine does."""

request_number: ContextVar[int] = ContextVar("request_number", default=0)
"""Of the request that this task answers; 0: it can come only once."""


async def commit(db: Database, change: Callable[[WriteTransaction], T]) -> T:
    """``db.commit(change, lazy=True)``, and the number of the request with it."""
    number = request_number.get()
    if not number:
        return await db.commit(change, lazy=True)

    def change_once(txn: WriteTransaction) -> T:
        result = change(txn)
        repeats.note_done(txn, number)
        return result

    result = await db.commit(change_once, lazy=True)
    die_if_told()
    return result


def die_if_told() -> None:
    """For tests."""
    if DIE_AFTER_COMMIT is not None and os.path.exists(DIE_AFTER_COMMIT):
        os.unlink(DIE_AFTER_COMMIT)
        os.kill(os.getpid(), signal.SIGKILL)


def is_repeated(db: Database) -> bool:
    """The change that the request asks for has been committed already."""
    number = request_number.get()
    if not number:
        return False
    with db.read() as txn:
        return repeats.is_done(txn, number)
