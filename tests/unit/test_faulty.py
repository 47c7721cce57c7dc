"""store.faulty: rules strike as they say, also when they come from a file."""

from __future__ import annotations

import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tierfs.errors import StoreThrottled, StoreTimeout, StoreUnavailable
from tierfs.store.faulty import Faults, FaultyStore, FileFaults, Rule
from tierfs.store.local import LocalStore


@pytest.fixture
def inner(tmp_path: Path) -> LocalStore:
    root = tmp_path / "root"
    root.mkdir()
    store = LocalStore(root)
    store.put("k", b"0123456789")
    return store


def test_no_rules_no_faults(inner: LocalStore) -> None:
    assert FaultyStore(inner, Faults()).get_range("k", 0, 10) == b"0123456789"


def test_count_operation_and_key(inner: LocalStore) -> None:
    faults = Faults(Rule(kind="outage", operation="get", key="k*", count=2))
    store = FaultyStore(inner, faults)
    store.head("k")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.get_range("k", 0, 1)
    assert store.get_range("k", 0, 1) == b"0"
    assert faults.struck == {"outage": 2}


def test_probability_is_seeded(inner: LocalStore) -> None:
    def strikes(seed: int) -> list[bool]:
        faults = Faults(Rule(kind="throttle", probability=0.5), seed=seed)
        return [bool(faults.choose("get", "k")) for _ in range(50)]

    assert strikes(1) == strikes(1)
    assert strikes(1) != strikes(2)
    assert 10 < sum(strikes(1)) < 40


def test_latency_adds_up_with_another_fault(inner: LocalStore) -> None:
    slept: list[float] = []
    rules = (Rule(kind="latency", seconds=0.5, bytes_per_s=10), Rule(kind="throttle", seconds=3))
    store = FaultyStore(inner, Faults(*rules), sleep=slept.append)
    with pytest.raises(StoreThrottled) as caught:
        store.get_range("k", 0, 10)
    assert slept == [1.5]
    assert caught.value.retry_after_s == 3


def test_blocked_until_the_rule_is_gone(inner: LocalStore, tmp_path: Path) -> None:
    """Other requests go on meanwhile; a file with rules is looked at again by those that wait."""
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"rules": [{"kind": "block", "operation": "get"}]}))
    waited = threading.Semaphore(0)
    faults = FileFaults(str(path), clock=itertools.count().__next__)
    store = FaultyStore(inner, faults, sleep=lambda _: waited.release())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(store.get_range, "k", 0, 10)
        for _ in range(3):
            assert waited.acquire(timeout=30)
        assert not answer.done()
        assert store.head("k").size_bytes == 10
        path.unlink()
        assert answer.result(30) == b"0123456789"


def test_closing_ends_what_is_blocked(inner: LocalStore) -> None:
    store = FaultyStore(inner, Faults(Rule(kind="block")))
    store.close()
    assert store.get_range("k", 0, 10) == b"0123456789"


def test_a_hang_ends_in_a_timeout(inner: LocalStore) -> None:
    slept: list[float] = []
    store = FaultyStore(inner, Faults(Rule(kind="hang", seconds=30)), sleep=slept.append)
    with pytest.raises(StoreTimeout):
        store.head("k")
    assert slept == [30]


def test_a_lost_answer_was_carried_out(inner: LocalStore) -> None:
    store = FaultyStore(inner, Faults(Rule(kind="lost_answer", operation="put")))
    with pytest.raises(StoreUnavailable):
        store.put("new", b"1")
    assert inner.head("new").size_bytes == 1


def test_an_outage_was_not(inner: LocalStore) -> None:
    store = FaultyStore(inner, Faults(Rule(kind="outage", operation="put")))
    with pytest.raises(StoreUnavailable):
        store.put("new", b"1")
    assert inner.list_page("new").objects == []


def test_wrong_etags(inner: LocalStore) -> None:
    store = FaultyStore(inner, Faults(Rule(kind="wrong_etag")))
    assert store.head("k").etag == "f" * 32
    assert [info.etag for info in store.list_page("").objects] == ["f" * 32]


def test_rules_from_a_file(inner: LocalStore, tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "faults.json"
    store = FaultyStore(inner, FileFaults(str(path), clock=lambda: now[0]))
    store.head("k")  # no file: no faults

    path.write_text(json.dumps({"seed": 3, "rules": [{"kind": "outage", "operation": "head"}]}))
    store.head("k")  # not looked at again so soon
    now[0] += 0.2
    with pytest.raises(StoreUnavailable):
        store.head("k")

    now[0] += 0.2
    path.write_text('{"rules": [{"kind": "no such kind"}]}')
    with pytest.raises(StoreUnavailable):  # what does not decode changes nothing
        store.head("k")

    now[0] += 0.2
    os.unlink(path)
    store.head("k")
