"""Requests about names of files that a native front sends straight to the thread that commits.

CREATE, UNLINK and RENAME are one change each, RELEASE is none. On their way through pyfuse3 and trio they
would wake up two threads more than need be, and cost several times what the change itself costs. So the
commit thread reads them from a socket of their own (``change.Source``), all that have arrived share a
transaction, and one packet has their answers. What has to wait for something (a directory that moves, a
request that an earlier engine has done already) goes on to ``extra`` instead.

Open files, orphans and what waits to be published belong to the trio thread. What it has to know of a change
is put into a queue before the front gets the answer, and ``settle`` takes it in: at the start of every later
request, before anybody looks at a ``FileContent``, and in any case soon.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import structlog
import trio

from tierfs.cache.spares import Spare
from tierfs.errors import TierfsError
from tierfs.fs import extra, repeats
from tierfs.fs.extra import ExtraRequests
from tierfs.fs.files import Files
from tierfs.fs.handles import FileHandle, open_flags
from tierfs.fs.names import Names, new_file_mode
from tierfs.fs.ops import PREFERRED_IO_BYTES, errno_of
from tierfs.fs.services import Services
from tierfs.namespace import records, tree
from tierfs.namespace import repeats as repeat_rows
from tierfs.namespace.change import Change
from tierfs.namespace.rename import RenameResult
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import Inode, new_content_id

log = structlog.get_logger(__name__)

SETTLE_S: Final = 0.05
"""How long the trio thread may not know of a change, when no request makes it look."""
REQUEST_MAX_BYTES: Final = 4096
"""More than a header, two names and the rest."""
TAKEN_AT_ONCE: Final = 256
_OUT_HEADER = struct.Struct("<IiQ")
_RELEASE_IN = struct.Struct("<Q")
_OPCODE: Final = slice(4, 8)
_RELEASE: Final = extra.RELEASE.to_bytes(4, "little")
_CREATED_OUT = struct.Struct(_OUT_HEADER.format + extra.ENTRY_OUT.format[1:] + extra.OPEN_OUT.format[1:])
_S_IFDIR = 0o040000
_S_IFMT = 0o170000


class _Elsewhere(Exception):
    """This request cannot be done in one step."""


class _Request(Change[Any]):
    """One request. ``number``: see ``repeats``."""

    __slots__ = ("direct", "message", "now_ns", "number", "parent", "unique")
    checks_first = True
    lazy = True

    def __init__(self, direct: DirectRequests, message: bytes, unique: int, parent: int, number: int) -> None:
        super().__init__()
        self.direct = direct
        self.message = message
        self.unique = unique
        self.parent = parent
        self.number = number
        self.now_ns = direct.services.now_ns()

    def run(self, txn: WriteTransaction) -> Any:
        if self.direct.may_be_repeated and repeat_rows.is_done(txn, self.number):
            return _Elsewhere
        result = self.change(txn)
        if result is not _Elsewhere:
            repeat_rows.note_done(txn, self.number)
        return result

    def change(self, txn: WriteTransaction) -> Any:
        raise NotImplementedError

    def settled(self, names: Names) -> None:
        """On the trio thread, after the commit."""
        raise NotImplementedError

    def undone(self) -> None:
        """Nothing has been changed."""

    def answer(self) -> bytes:
        return _OUT_HEADER.pack(_OUT_HEADER.size, 0, self.unique)


class _Create(_Request):
    __slots__ = ("flags", "gid", "handle", "mode", "name", "passes", "spare", "uid")
    name: bytes
    flags: int
    mode: int
    uid: int
    gid: int
    handle: int
    spare: Spare | None
    """The staging file, if it is there already."""
    passes: bool
    """Writes go there without passing here."""

    def change(self, txn: WriteTransaction) -> Inode:
        services = self.direct.services
        writes = self.flags & os.O_ACCMODE != os.O_RDONLY
        if self.spare is None and writes and not services.expected_copies.is_likely:
            self.spare = services.cache.take_spare()
        inode = tree.create(
            txn,
            self.parent,
            self.name,
            mode=self.mode,
            uid=self.uid,
            gid=self.gid,
            content_id=new_content_id() if self.spare is None else self.spare.content_id,
            now_ns=self.now_ns,
        )
        self.handle = self.direct.services.handles.new_number()
        return inode

    def undone(self) -> None:
        if self.spare is not None:
            self.direct.services.cache.give_back_spare(self.spare)

    def answer(self) -> bytes:
        inode = cast(Inode, self.result)
        if self.spare is not None:
            self.passes = self._lend(inode, self.spare.descriptor)
        flags = open_flags(passes=self.passes, tells_close=self.passes and self.uid != 0)
        timeout_s = self.direct.services.attr_timeout_s(inode)
        seconds, nanoseconds = int(timeout_s), int(timeout_s % 1 * 1e9)
        time_s, time_ns = divmod(inode.ctime_ns, 1_000_000_000)
        return _CREATED_OUT.pack(
            _CREATED_OUT.size, 0, self.unique,
            inode.ino, inode.generation, seconds, seconds, nanoseconds, nanoseconds,
            inode.ino, 0, 0, time_s, time_s, time_s, time_ns, time_ns, time_ns,
            inode.mode, inode.nlink, inode.uid, inode.gid, 0, PREFERRED_IO_BYTES, 0,
            self.handle, flags, 0,
        )  # fmt: skip

    def _lend(self, inode: Inode, descriptor: int) -> bool:
        lend = self.direct.services.lend
        try:
            os.utime(descriptor, ns=(inode.mtime_ns, inode.mtime_ns))
            return lend is not None and lend(inode.ino, descriptor)
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def settled(self, names: Names) -> None:
        services, inode = self.direct.services, cast(Inode, self.result)
        content = services.contents.acquire_new(inode)
        handle = FileHandle(content, self.flags, self.uid, self.passes)
        content.writers += handle.can_write
        if self.spare is not None:
            content.staging = services.cache.adopt_spare(self.spare, inode.mtime_ns)
        if self.passes and self.spare is not None:
            content.passed_file = self.spare.identity
            services.contents.passthrough.count_passed(content, writes=True)
        services.handles.put_file(self.handle, handle)
        services.publisher.schedule.note(inode.ino)


class _Unlink(_Request):
    __slots__ = ("name",)
    name: bytes

    def change(self, txn: WriteTransaction) -> Inode:
        return tree.unlink(txn, self.parent, self.name, now_ns=self.now_ns)

    def settled(self, names: Names) -> None:
        self.direct.services.publisher.schedule.note(self.parent)
        self.direct.name_removed(cast(Inode, self.result))


class _Rename(_Request):
    __slots__ = ("name", "new_name", "new_parent", "noreplace")
    name: bytes
    new_parent: int
    new_name: bytes
    noreplace: bool

    def change(self, txn: WriteTransaction) -> Any:
        for parent, name in ((self.parent, self.name), (self.new_parent, self.new_name)):
            found = records.find_entry(txn, parent, name) if len(name) <= 255 else None
            if found is not None and found[2] & _S_IFMT == _S_IFDIR:
                return _Elsewhere
        return tree.rename(
            txn,
            self.parent,
            self.name,
            self.new_parent,
            self.new_name,
            now_ns=self.now_ns,
            noreplace=self.noreplace,
        )

    def settled(self, names: Names) -> None:
        result = cast(RenameResult, self.result)
        names.note_renamed(result, self.parent)
        if result.replaced is not None:
            self.direct.name_removed(result.replaced)


class _Release:
    """RELEASE: nothing is changed by it, and nobody waits for an answer."""

    __slots__ = ("direct", "number", "unique")

    def __init__(self, direct: DirectRequests, message: bytes, unique: int) -> None:
        self.direct = direct
        self.unique = unique
        self.number: int = _RELEASE_IN.unpack_from(message, extra.HEADER.size)[0]

    def settled(self, names: Names) -> None:
        """On the trio thread, after all that was committed before it came."""
        self.direct.released(self.number)


class DirectRequests:
    """See the module docstring. ``take`` and ``finish`` run on the commit thread, all else on trio's."""

    def __init__(
        self, services: Services, others: ExtraRequests, descriptor: int, *, may_be_repeated: bool
    ) -> None:
        self.services = services
        self.descriptor = descriptor
        self.may_be_repeated = may_be_repeated
        """There was an engine before this one."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._names = Names(services)
        self._others = others
        self._files = Files(services, self._names)
        self._done: deque[_Request | _Release] = deque()
        """Committed, and not known to the trio thread yet."""
        self._settling = False
        self._is_closing = False
        self._told = False
        self._arrived = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._nursery: trio.Nursery | None = None

    # on the commit thread

    def take(self) -> Sequence[Change[Any]]:
        """See ``Source``."""
        taken: list[_Request] = []
        receive = self._socket.recv
        while len(taken) < TAKEN_AT_ONCE:
            try:
                message = receive(REQUEST_MAX_BYTES)
            except OSError:
                break  # nothing more; or the front is gone, and ``NativeFront.run`` ends this process
            if not message:
                break
            try:
                if message[_OPCODE] == _RELEASE:
                    self._done.append(_Release(self, message, extra.HEADER.unpack_from(message)[2]))
                    continue
                taken.append(self._decode(message))
            except _Elsewhere:
                self._hand_over(message)
            except Exception as error:
                self._send([self._refusal(message, errno_of(error, "names"))])
        self._tell()
        return taken

    def _tell(self) -> None:
        if self._done and not self._told:
            self._told = True
            self._on_trio(self._soon)

    def _decode(self, message: bytes) -> _Request:
        _, opcode, unique, parent, uid, gid, number, _, _ = extra.HEADER.unpack_from(message)
        body = message[extra.HEADER.size :]
        check = self._names.check_writable
        if opcode == extra.CREATE:
            create = _Create(self, message, unique, parent, number)
            create.flags, mode, create.name = extra.unpack_create(body)
            create.mode, create.uid, create.gid = new_file_mode(mode), uid, gid
            create.spare, create.passes = None, False
            check(parent, create.name)
            return create
        if opcode == extra.UNLINK:
            unlink = _Unlink(self, message, unique, parent, number)
            unlink.name = extra.unpack_name(body)
            check(parent, unlink.name)
            return unlink
        if opcode not in (extra.RENAME, extra.RENAME2):
            raise _Elsewhere
        rename = _Rename(self, message, unique, parent, number)
        rename.new_parent, rename.name, rename.new_name, flags = extra.unpack_rename(opcode, body)
        if flags not in (0, 1):
            raise _Elsewhere
        rename.noreplace = bool(flags)
        check(parent, rename.name)
        check(rename.new_parent, rename.new_name)
        return rename

    def finish(self, changes: Sequence[Change[Any]]) -> None:
        """See ``Source``."""
        answers = []
        for request in changes:
            assert isinstance(request, _Request)
            if request.error is not None:
                request.undone()
                answers.append(self._error_of(request))
            elif request.result is _Elsewhere:
                request.undone()
                self._hand_over(request.message)
            else:
                answers.append(request.answer())  # first: it decides what the trio thread has to know
                self._done.append(request)
        repeats.die_if_told()
        if answers:
            self._send(answers)
        self._tell()

    def _error_of(self, request: _Request) -> bytes:
        error = request.error
        code = errno_of(error if isinstance(error, Exception) else TierfsError(repr(error)), "names")
        return self._refusal(request.message, code)

    def _refusal(self, message: bytes, code: int) -> bytes:
        return _OUT_HEADER.pack(_OUT_HEADER.size, -code, extra.HEADER.unpack_from(message)[2])

    def _send(self, answers: Sequence[bytes]) -> None:
        # Each begins at a multiple of eight bytes: they all have such a length.
        while True:
            try:
                self._socket.send(b"".join(answers), socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                select.select([], [self._socket], [])
            except OSError as failure:
                log.warning("an answer did not reach the front", reason=str(failure))
                return

    def _hand_over(self, message: bytes) -> None:
        self._on_trio(partial(self._others.take, message, self._answer))

    def _on_trio(self, function: Callable[[], object]) -> None:
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            log.warning("a request came after the end of this engine")

    # on the trio thread

    async def _answer(self, unique: int, error: int, body: bytes) -> None:
        self._send([_OUT_HEADER.pack(_OUT_HEADER.size + len(body), -error, unique) + body])

    def _soon(self) -> None:
        self._arrived.set()

    def settle(self) -> None:
        """Take in what has been committed. On another thread: nothing, for contents are not its own."""
        done = self._done
        if not done or self._settling or threading.get_ident() != self._thread:
            return
        self._settling = True
        try:
            while done:
                request = done.popleft()
                try:
                    request.settled(self._names)
                except Exception:
                    log.exception("unexpected exception after a change", unique=request.unique)
        finally:
            self._settling = False

    def released(self, number: int) -> None:
        """Part of ``settle``."""
        if not self._files.release_now(number):
            self._start(self._files.release, number)
        elif not self._is_closing:
            self._is_closing = True
            self._start(self._save_closed)

    def _start(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(function, *args)

    async def _save_closed(self) -> None:
        # All that is settled in this round of the loop, at least.
        await trio.lowlevel.checkpoint()
        self._is_closing = False
        await self._files.save_closed()

    def name_removed(self, inode: Inode) -> None:
        """Part of ``settle``."""
        content = self.services.contents.peek(inode.ino)
        if content is not None and inode.is_regular and not inode.nlink:
            # At once: whoever has it open may be through with it before a task has begun.
            content.unlinked = True
            self._names.note_removed(inode)
        elif self._names.note_removed(inode):
            self._start(self._drop, inode)

    async def _drop(self, inode: Inode) -> None:
        try:
            await self.services.contents.drop_unlinked(inode)
        except TierfsError as error:
            log.warning("bytes without a name were not dropped", ino=inode.ino, reason=str(error))

    async def run(self) -> None:
        """A task of the mount: settles what no request has settled."""
        async with trio.open_nursery() as self._nursery:
            while True:
                await self._arrived.wait()
                await trio.sleep(SETTLE_S)
                self._arrived = trio.Event()
                self._told = False
                self.settle()


def listen(
    services: Services, others: ExtraRequests, descriptor: int, *, may_be_repeated: bool
) -> DirectRequests:
    """Begin to take requests from ``descriptor``; ``run`` has to be started as well."""
    os.set_inheritable(descriptor, False)
    direct = DirectRequests(services, others, descriptor, may_be_repeated=may_be_repeated)
    services.settle = services.contents.before_look = direct.settle
    services.db.serve(direct)
    return direct
