"""POSIX paths, which are bytes, as object keys, which are text, and back: a bijection.

Pure functions, callable from anywhere.

A name that is valid UTF-8 is its own key, so that every other tool sees the same name. A byte 0x80-0xFF
that is not part of valid UTF-8 becomes the private-use character U+F700 + byte (U+F780 to U+F7FF). A real
character from that range in a name is escaped byte by byte in the same way, which keeps the mapping
unambiguous. A key is representable only if it is exactly what ``encode_path`` makes of its decoding;
all others have no POSIX name and are hidden (and counted) by the namespace.

Other ways considered: percent-escapes change names that other tools already wrote with ``%``; surrogates
are refused by XML, by JSON and by most servers.
"""

from __future__ import annotations

MAX_NAME_BYTES = 255
_FIRST, _LAST = 0xF780, 0xF7FF

# str.translate tables. Undecodable bytes arrive as lone surrogates U+DC80..U+DCFF ("surrogateescape").
_ENCODE: dict[int, str] = {0xDC00 + byte: chr(0xF700 + byte) for byte in range(0x80, 0x100)}
for _point in range(_FIRST, _LAST + 1):
    _ENCODE[_point] = "".join(chr(0xF700 + byte) for byte in chr(_point).encode())
_DECODE: dict[int, int] = {0xF700 + byte: 0xDC00 + byte for byte in range(0x80, 0x100)}


def encode_path(path: bytes) -> str:
    """The key of a relative path (no leading slash; a trailing one is kept: a directory's key).

    Names are what the kernel passed: no empty, ``.`` or ``..`` parts and no NUL; this is not checked.
    """
    if path.isascii():
        return path.decode("ascii")
    return path.decode("utf-8", "surrogateescape").translate(_ENCODE)


def decode_key(key: str) -> bytes | None:
    """The path that ``encode_path`` would turn into this key, or None if there is none.

    None for: empty parts (``a//b``, a leading slash), ``.`` and ``..`` parts, NUL, parts over 255 bytes,
    and keys that are not the canonical encoding. One trailing slash is kept. The empty key is the root.
    """
    if key.isascii():
        path = key.encode("ascii")
    else:
        try:
            path = key.translate(_DECODE).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return None
        if encode_path(path) != key:
            return None
    return path if _is_clean(path) else None


def is_representable(key: str) -> bool:
    """Whether the key has a POSIX path."""
    return decode_key(key) is not None


def key_size_bytes(key: str) -> int:
    """Length as the store counts it (``MAX_KEY_BYTES``): UTF-8 bytes."""
    return len(key) if key.isascii() else len(key.encode("utf-8", "surrogatepass"))


def _is_clean(path: bytes) -> bool:
    if b"\0" in path:
        return False
    if not path:
        return True
    for part in path.removesuffix(b"/").split(b"/"):
        if not part or len(part) > MAX_NAME_BYTES or part in (b".", b".."):
            return False
    return True
