"""Numbers of open files, over the engines of a mount."""

from __future__ import annotations

from tierfs.fs.handles import DirectoryHandle, HandleTable


def test_no_engine_gives_out_a_number_of_another() -> None:
    """A RELEASE that is repeated must not hit what was opened since."""
    given: set[int] = set()
    for engine in range(1, 6):
        handles = HandleTable()
        if engine > 1:
            handles.restore_directory(min(given), DirectoryHandle(7))  # the rest was closed
        handles.number_from(engine)
        new = {handles.add_directory(DirectoryHandle(1)) for _ in range(1000)}
        assert not new & given
        assert max(new) < 1 << 63
        given |= new


def test_a_restored_handle_keeps_its_number() -> None:
    handles = HandleTable()
    handles.restore_directory(5, DirectoryHandle(7))
    assert handles.add_directory(DirectoryHandle(8)) == 6
    assert handles.directory(5).ino == 7
