"""One save, as one rank takes part in it: begin, then finish or fail. Standard library only.

``FileSession``: all ranks on one node, which hear of each other through the working directory. Rank 0 makes
it, waits for the others, and gives it its name; so exactly one publishes.

``GroupSession``: through ``torch.distributed``. The lowest rank of each node does on its mount what rank 0
does above, in two steps: when every node has asked its engine for the manifest, all rename. The engine of
rank 0's node writes the manifest, when those of the others have told through the bucket what they have put
there.

If one rank fails, or is killed, nobody publishes, and every rank that is left raises ``CheckpointError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tierfs.checkpoint import ranks, working
from tierfs.checkpoint.ranks import Group, Ranks
from tierfs.checkpoint.working import WorkingDirectory
from tierfs.errors import CheckpointError

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.05
"""Between two looks; those of all ranks but the first cost no request."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be saved, and how. ``final``: the absolute path of the checkpoint."""

    final: str
    step: int | None
    replace: bool
    fsync: bool
    timeout_s: float


class Session(Protocol):
    """See the module docstring."""

    @property
    def path(self) -> str:
        """Where this rank writes."""
        ...

    def finish(self, files: Sequence[str]) -> None:
        """This rank has written everything, ``files`` (below ``path``) among it. Returns once published."""
        ...

    def fail(self, error: BaseException) -> None:
        """This rank will not finish. Raises nothing."""
        ...


def begin(order: Order, who: Ranks) -> Session:
    """Returns when the working directory is there. Raises ``CheckpointError``, ``OSError``."""
    if who.group is not None:
        return GroupSession(order, who, who.group)
    return FileSession(order, who)


class FileSession:
    """See the module docstring."""

    def __init__(self, order: Order, who: Ranks) -> None:
        self._order = order
        self._who = who
        self._deadline_s = time.monotonic() + order.timeout_s
        working.check_mount(_existing(order.final))
        _refuse_existing(order)
        if who.rank == 0:
            self._working = _make(order, secrets.token_hex(16), who.world_size)
        else:
            self._working = self._join()

    @property
    def path(self) -> str:
        return self._working.path

    def _join(self) -> WorkingDirectory:
        order, who = self._order, self._who
        found: list[WorkingDirectory] = []

        def there() -> bool:
            known = WorkingDirectory.find(order.final)
            found.extend([known] if known is not None else [])
            return bool(found)

        self._wait(there, "rank 0 has not begun to save it")
        (directory,) = found
        try:
            if directory.attempt["world_size"] != who.world_size:
                raise CheckpointError(
                    f"{order.final}: rank 0 saves with {directory.attempt['world_size']} ranks, "
                    f"rank {who.rank} with {who.world_size}"
                )
            directory.tell(who.rank, {"state": "writing", **ranks.process()}, first=True)
        except FileExistsError:
            directory.close()
            raise CheckpointError(f"{order.final}: there are two ranks {who.rank}") from None
        except BaseException:
            directory.close()
            raise
        return directory

    def finish(self, files: Sequence[str]) -> None:
        directory = self._working
        self._deadline_s = time.monotonic() + self._order.timeout_s
        try:
            if self._order.fsync:
                directory.sync(list(files))
            if self._who.rank == 0:
                self._publish(list(files))
            else:
                _tell_files(directory, self._who.rank, files)
                self._wait(self._is_over, "rank 0 has not published it")
        except BaseException as error:
            self.fail(error)
            raise
        directory.close()

    def _publish(self, own: list[str]) -> None:
        directory, order = self._working, self._order
        missing = set(range(1, self._who.world_size))
        written = set(own)

        def all_done() -> bool:
            for rank in sorted(missing):
                told = directory.heard(rank)
                if told is None:
                    continue
                if told["state"] == "failed":
                    raise CheckpointError(f"{order.final}: rank {rank} failed: {told['message']}")
                if told["state"] == "done":
                    missing.discard(rank)
                    written.update(told["files"])
                elif ranks.is_gone(told):
                    raise CheckpointError(f"{order.final}: the process of rank {rank} has ended")
            return not missing

        self._wait(all_done, lambda: f"not finished: ranks {', '.join(map(str, sorted(missing)))}")
        _tell_files(directory, 0, own)
        if order.fsync:
            directory.sync([file for file in directory.files() if file not in written])
        directory.request(
            {"id": directory.attempt["id"], "step": order.step, "world_size": self._who.world_size}
        )
        directory.publish(replace=order.replace)

    def _is_over(self) -> bool:
        if self._working.is_published:
            return True
        if self._working.is_abandoned:
            raise CheckpointError(
                f"{self._order.final}: rank 0 has given up, or was killed; nothing is published"
            )
        return False

    def fail(self, error: BaseException) -> None:
        directory = self._working
        with contextlib.suppress(OSError):
            if self._who.rank == 0:
                directory.discard()
            else:
                directory.tell(self._who.rank, {"state": "failed", "message": repr(error)[:1000]})
        directory.close()

    def _wait(self, condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
        pause_s = FIRST_PAUSE_S
        while not condition():
            if time.monotonic() > self._deadline_s:
                said = what if isinstance(what, str) else what()
                raise CheckpointError(f"{self._order.final}: after {self._order.timeout_s:g} s {said}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class GroupSession:
    """See the module docstring."""

    def __init__(self, order: Order, who: Ranks, group: Group) -> None:
        self._order = order
        self._who = who
        self._group = group
        offered = group.gather((ranks.node_of(order.final), secrets.token_hex(16)))
        nodes = [node for node, _ in offered]
        self._save_id = str(offered[0][1])
        leaders = sorted({nodes.index(node) for node in nodes})
        self._mates = [rank for rank, node in enumerate(nodes) if node == nodes[who.rank]]
        self._node, self._nodes = leaders.index(self._mates[0]), len(leaders)
        self._is_leader = self._mates[0] == who.rank
        self._working: WorkingDirectory | None = None
        self._together(self._begin)
        self._path = working.working_path(order.final)

    @property
    def path(self) -> str:
        return self._path

    def _begin(self) -> None:
        _refuse_existing(self._order)
        if self._nodes > 1 and self._order.replace:
            raise CheckpointError(f"{self._order.final}: replace=True does not work over several nodes")
        if self._is_leader:
            self._working = _make(self._order, self._save_id, self._who.world_size)

    def finish(self, files: Sequence[str]) -> None:
        def sync() -> None:
            if self._order.fsync:
                for file in files:
                    working.fsync(os.path.join(self._path, file))

        told = self._together(sync, list(files))
        self._together(lambda: self._prepare(told))
        self._together(self._publish)
        if self._working is not None:
            self._working.close()

    def _prepare(self, told: list[Any]) -> None:
        directory, order = self._working, self._order
        if directory is None:
            return
        for rank in self._mates:
            _tell_files(directory, rank, told[rank])
        if order.fsync:
            written = {file for rank in self._mates for file in told[rank]}
            directory.sync([file for file in directory.files() if file not in written])
        directory.request(
            {
                "id": self._save_id, "step": order.step, "world_size": self._who.world_size,
                "node": self._node, "nodes": self._nodes,
            }
        )  # fmt: skip

    def _publish(self) -> None:
        if self._working is not None:
            self._working.publish(replace=self._order.replace)

    def _together(self, step: Callable[[], None], value: Any = None) -> list[Any]:
        """Every rank does its part; returns the values. If one cannot, all raise and nothing is published."""
        mine: BaseException | None = None
        try:
            step()
        except Exception as error:
            mine = error
        answers = self._group.gather((None if mine is None else repr(mine)[:1000], value))
        failed = [(rank, message) for rank, (message, _) in enumerate(answers) if message is not None]
        if failed:
            self._give_up()
            if mine is not None:
                raise mine
            raise CheckpointError(f"{self._order.final}: rank {failed[0][0]} failed: {failed[0][1]}")
        return [value for _, value in answers]

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            self._group.gather((repr(error)[:1000], None))
        self._give_up()

    def _give_up(self) -> None:
        if self._working is not None:
            with contextlib.suppress(OSError):
                self._working.discard()
            self._working.close()
            self._working = None


def _make(order: Order, save_id: str, world_size: int) -> WorkingDirectory:
    working.check_mount(_existing(order.final))
    os.makedirs(os.path.dirname(order.final), exist_ok=True)
    return WorkingDirectory.make(order.final, {"id": save_id, "world_size": world_size})


def _existing(path: str) -> str:
    """The deepest directory above that is there."""
    path = os.path.dirname(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _refuse_existing(order: Order) -> None:
    if os.path.lexists(order.final) and (os.path.islink(order.final) or not os.path.isdir(order.final)):
        raise FileExistsError(errno.EEXIST, "what has this name is no directory", order.final)
    if not order.replace and os.path.lexists(order.final):
        raise FileExistsError(errno.EEXIST, "this checkpoint exists (replace=True replaces it)", order.final)


def _tell_files(directory: WorkingDirectory, rank: int, files: Sequence[str]) -> None:
    """Too many names for an attribute: then the manifest does not say which rank wrote them."""
    try:
        directory.tell(rank, {"state": "done", "files": list(files)})
    except OSError as error:
        if error.errno not in (errno.E2BIG, errno.ENOSPC, errno.ERANGE):
            raise
        directory.tell(rank, {"state": "done", "files": []})
