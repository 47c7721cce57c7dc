"""Which mounts this process can read directly, and the connection to each: namespace, tiers, reader.

One ``Places`` per process; after a fork the child makes a new one, and lets its parent's alone: LMDB
environments, rings and locks in it belong to the parent. LMDB must not be opened twice in one process, so
environments are shared by whoever needs them, and an environment that this process has open by other means
(an engine has) is refused: the mount is then not read directly.

A mount is looked at again when the kernel's list of mounts changes, when its engine announces itself anew,
when its namespace is another file, and, while it cannot be read directly, every few seconds.
"""

from __future__ import annotations

import atexit
import os
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from tierfs.batch import native
from tierfs.control import registry
from tierfs.control.client import ControlClient
from tierfs.control.registry import MountRecord
from tierfs.errors import TierfsError
from tierfs.mountpoint import MountInfo, mounts, tierfs_mounts
from tierfs.types import ROOT_INO

STATUS_TIMEOUT_S = 5.0
RETRY_S = 5.0
"""How long a mount that cannot be read directly is left alone."""
INITIAL_USER_NAMESPACE = [b"0", b"0", b"4294967295"]

FileIdentity = tuple[int, int]
"""Device and inode number."""


class Unusable(Exception):
    """Why a mount cannot be read directly: half a sentence for people."""


@dataclass(slots=True)
class Place:
    """One mount. ``reader`` None: it cannot be read directly, ``why`` says why not."""

    mount: MountInfo
    reader: native.Reader | None = None
    why: str = ""
    record_path: str = ""
    namespace_path: str = ""
    seen: tuple[object, ...] = ()
    """What must stay as it is for the reader to be right."""
    tried_s: float = field(default_factory=time.monotonic)

    def look(self, extension: native.Extension) -> tuple[object, ...]:
        """What ``seen`` is compared with. Asks no server."""
        try:
            record, namespace = os.stat(self.record_path), os.stat(self.namespace_path)
            return (extension.identify(self.mount.path), record.st_ino, record.st_mtime_ns,
                    namespace.st_dev, namespace.st_ino)
        except OSError:
            return ()


class Places:
    """Every mount of this process. Any thread."""

    def __init__(self, inherited: frozenset[FileIdentity] = frozenset()) -> None:
        """``inherited``: what the parent had open when this process was forked."""
        self.pid = os.getpid()
        self.files: Counter[str] = Counter()
        """Files read, by how."""
        self.extension = native.extension()
        self._inherited = inherited
        self._lock = threading.Lock()
        self._open: WeakValueDictionary[FileIdentity, object] = WeakValueDictionary()
        self._ever_opened: set[FileIdentity] = set()
        self._mounts: list[MountInfo] = []
        self._places: dict[str, Place] = {}
        self._poll: select.poll | None = None

    def for_child(self) -> Places:
        """In a child of this process: its own places. Nothing of the parent's is touched, nor closed."""
        return Places(self._inherited | self._ever_opened)

    @property
    def mounts(self) -> list[MountInfo]:
        """All mounts of the mount namespace, as last seen."""
        return self._mounts

    def all(self) -> list[Place]:
        """The tierfs mounts, after ``readers`` has looked at them."""
        return list(self._places.values())

    def readers(self) -> list[native.Reader]:
        """Of every mount that can be read directly at this moment."""
        extension = self.extension
        if extension is None:
            return []
        with self._lock:
            if self._mounts_changed():
                self._mounts = mounts()
                here = {mount.path: mount for mount in tierfs_mounts(self._mounts)}
                self._places = {
                    path: place for path, place in self._places.items() if here.get(path) == place.mount
                }
                for path, mount in here.items():
                    if path not in self._places:
                        self._places[path] = self._attach(Place(mount))
            found = []
            for path, place in self._places.items():
                if place.reader is None:
                    outdated = time.monotonic() - place.tried_s > RETRY_S
                else:
                    outdated = place.look(extension) != place.seen
                if outdated:
                    place = self._places[path] = self._attach(Place(place.mount))
                if place.reader is not None:
                    found.append(place.reader)
            return found

    def give_up(self, reader: native.Reader, error: OSError) -> None:
        """That reader failed; its mount is not read directly for some seconds."""
        with self._lock:
            for place in self._places.values():
                if place.reader is reader:
                    place.reader, place.why = None, f"reading failed: {error.strerror or error}"
                    place.tried_s = time.monotonic()

    def _mounts_changed(self) -> bool:
        """The kernel marks the file when a mount comes or goes. Source: proc(5), poll on mountinfo."""
        if self._poll is None:
            descriptor = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLPRI)
            return True
        return bool(self._poll.poll(0))

    def _attach(self, place: Place) -> Place:
        try:
            self._connect(place)
        except Unusable as error:
            place.why = str(error)
        except TierfsError as error:
            place.why = f"its engine does not tell where its tiers are: {error}"
        except OSError as error:
            place.why = f"{error.filename or place.mount.path}: {error.strerror or error}"
        place.tried_s = time.monotonic()
        return place

    def _connect(self, place: Place) -> None:
        extension = self.extension
        assert extension is not None
        point = place.mount.path
        record = _record_of(point)
        covered = [m.path for m in self._mounts if m.path.startswith(f"{point.rstrip('/')}/")]
        if covered:
            raise Unusable(f"something else is mounted below it, at {covered[0]}")
        place.record_path = str(registry.run_dir() / f"{record.mount_id}.json")
        place.namespace_path = os.path.join(record.state_dir, "namespace.lmdb", "data.mdb")
        before = place.look(extension)
        if not before:
            raise Unusable("its namespace cannot be reached from here")
        major, minor, ino = extension.identify(point)
        if f"{major}:{minor}" != place.mount.device or ino != ROOT_INO:
            raise Unusable("its mountpoint leads elsewhere")
        with ControlClient(record.socket_path, timeout_s=STATUS_TIMEOUT_S) as client:
            tiers = client.call("status").tiers
        directory = os.path.dirname(place.namespace_path)
        names = self._database(directory, lambda: extension.Names(directory))
        reader = extension.Reader(
            os.fsencode(point), names, tuple(self._tier(extension, tier.path) for tier in tiers),
            record.uid, _believes_capabilities(),
        )
        if place.look(extension) != before:
            raise Unusable("its engine is being started")
        place.reader, place.seen = reader, before

    def _tier(self, extension: native.Extension, root: str) -> tuple[bytes, object]:
        path = os.path.join(root, "index.lmdb")
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        return os.fsencode(root), self._database(path, lambda: extension.Index(path, boot))

    def _database(self, directory: str, open_it: Callable[[], object]) -> object:
        """The open environment of that directory."""
        path = os.path.join(directory, "data.mdb")
        info = os.stat(path)
        identity = (info.st_dev, info.st_ino)
        known = self._open.get(identity)
        if known is None:
            if identity not in self._inherited and _is_mapped(info.st_ino):
                raise Unusable(f"this process has {path} open already")
            known = self._open[identity] = open_it()
            self._ever_opened.add(identity)
        return known


def _record_of(mountpoint: str) -> MountRecord:
    if os.geteuid() != os.getuid():
        raise Unusable("this process runs with another user's rights")
    found = [record for record in registry.records() if record.mountpoint == mountpoint]
    if not found:
        raise Unusable("this user has no record of its engine")
    running = [record for record in found if record.is_running()]
    if not running:
        raise Unusable("its engine does not run")
    if running[0].uid != os.geteuid():
        raise Unusable(f"it belongs to user {running[0].uid}")
    return running[0]


def _believes_capabilities() -> bool:
    """Root's capabilities count for files of every owner only outside user namespaces."""
    try:
        return Path("/proc/self/uid_map").read_bytes().split() == INITIAL_USER_NAMESPACE
    except OSError:
        return False


def _is_mapped(ino: int) -> bool:
    """This process has an LMDB file with that inode number mapped."""
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and int(fields[4]) == ino and fields[5].endswith(b"/data.mdb"):
            return True
    return False


_places: Places | None = None
_making = threading.Lock()


def current() -> Places:
    """The places of this process."""
    places = _places
    if places is None or places.pid != os.getpid():
        places = _make()
    return places


def _make() -> Places:
    global _places
    with _making:
        if _places is None or _places.pid != os.getpid():
            _places = Places() if _places is None else _places.for_child()
            _close_at_exit()
        return _places


def _close_at_exit() -> None:
    """Give the slots in LMDB's reader tables back: a process that does not keeps them until somebody checks.

    Children of ``multiprocessing`` (the workers of a ``DataLoader``) end without the interpreter's own exit
    handlers, but with those of that module.
    """
    atexit.register(_close)
    workers = sys.modules.get("multiprocessing.util")
    if workers is not None:
        workers.Finalize(None, _close, exitpriority=0)


def _close() -> None:
    global _places
    if _places is not None and _places.pid == os.getpid():
        _places = None


def _after_fork() -> None:
    """In the child, which has one thread. The lock may have been held by another one of the parent's."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
