"""store.keys: the mapping between paths and keys is a bijection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.store.keys import decode_key, encode_path, is_representable, key_size_bytes

NAMES = st.binary(min_size=1, max_size=60).map(lambda b: b.replace(b"\0", b"n").replace(b"/", b"s"))
PATHS = st.lists(NAMES.filter(lambda n: n not in (b".", b"..")), min_size=1, max_size=5).map(b"/".join)


@pytest.mark.parametrize(
    "name",
    ["a b", "a+b", "a%20b", "100%.csv", "folder#1#/x", "한글/x", "\u00e9", "e\u0301", "a\nb", "\x01",
     "\U0001f600"],
)
def test_valid_utf8_maps_to_itself(name: str) -> None:
    assert encode_path(name.encode()) == name
    assert decode_key(name) == name.encode()


def test_composed_and_decomposed_names_stay_two_keys() -> None:
    assert encode_path("\u00e9".encode()) != encode_path("e\u0301".encode())


def test_invalid_bytes_become_private_use_characters() -> None:
    assert encode_path(b"a\xff\x80z") == "a\uf7ff\uf780z"
    assert decode_key("a\uf7ff\uf780z") == b"a\xff\x80z"


def test_real_private_use_characters_are_escaped_bytewise() -> None:
    path = "\uf780".encode()
    assert path == b"\xef\x9e\x80"
    assert encode_path(path) == "\uf7ef\uf79e\uf780"
    assert decode_key("\uf7ef\uf79e\uf780") == path


@pytest.mark.parametrize(
    "key",
    [
        "a//b", "/a", "//", "/", "a//", ".", "..", "a/./b", "../a", "a/..", "a/../", "nul\0", "x" * 256,
        "d/" + "é" * 128,
        "\uf7c3\uf7a9",  # bytes of a valid "é": not canonical
        chr(0xDC80),  # lone surrogates are not canonical either
        chr(0xD800),
    ],
)
def test_unrepresentable_keys(key: str) -> None:
    assert decode_key(key) is None
    assert not is_representable(key)


@pytest.mark.parametrize("key", ["", "a", "a/", "a/b/", "...", ".a", "..a/b", "x" * 255, "é" * 127])
def test_representable_keys(key: str) -> None:
    path = decode_key(key)
    assert path is not None
    assert encode_path(path) == key


@given(PATHS)
def test_every_path_survives_the_round_trip(path: bytes) -> None:
    assert decode_key(encode_path(path)) == path


@given(PATHS, PATHS)
def test_two_paths_never_share_a_key(first: bytes, second: bytes) -> None:
    assert (encode_path(first) == encode_path(second)) == (first == second)


@given(st.text(alphabet=st.characters(min_codepoint=1), max_size=40))
def test_a_decodable_key_is_the_encoding_of_its_path(key: str) -> None:
    path = decode_key(key)
    assert path is None or encode_path(path) == key


@given(st.text(alphabet=st.sampled_from("\uf780\uf79e\uf7ef\uf7c3\uf7a9\uf7ffa/é"), max_size=12))
def test_escape_characters_never_decode_ambiguously(key: str) -> None:
    path = decode_key(key)
    assert path is None or encode_path(path) == key


def test_key_size_counts_utf8_bytes() -> None:
    assert key_size_bytes("abc") == 3
    assert key_size_bytes("é한") == 5
