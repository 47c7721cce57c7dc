"""What this process reads directly, and why not the rest."""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.batch import native, places


@dataclass(frozen=True, slots=True)
class MountStatus:
    """One tierfs mount. ``why``: why it is not read directly; empty if it is."""

    mountpoint: str
    is_direct: bool
    why: str


@dataclass(frozen=True, slots=True)
class Status:
    """``is_native``: the extension module is there; without it everything goes through the mount (``why``).

    ``uses_io_uring``: False where the kernel or the container forbids it; reads then take turns.
    ``files``: files read by this process so far: ``local``, or through the mount by reason, see the package.
    """

    is_native: bool
    why: str
    uses_io_uring: bool
    mounts: list[MountStatus]
    files: dict[str, int]


def status() -> Status:
    """Looks at the mounts anew."""
    here = places.current()
    readers = here.readers()
    return Status(
        is_native=here.extension is not None,
        why="" if here.extension is not None else native.why_missing(),
        uses_io_uring=any(reader.has_ring() for reader in readers),
        mounts=[
            MountStatus(mountpoint=place.mount.path, is_direct=place.reader is not None, why=place.why)
            for place in here.all()
        ],
        files=dict(here.files),
    )
