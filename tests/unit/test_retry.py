"""store.retry: what is repeated, how long, and what a lost answer means. Time is a variable here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierfs.errors import (
    CredentialsExpired,
    ObjectNotFound,
    PreconditionFailed,
    ShortBody,
    StoreAccessDenied,
    StoreThrottled,
    StoreTimeout,
    StoreUnavailable,
    TransientStoreError,
)
from tierfs.metrics import Metrics
from tierfs.store.base import Condition, DeleteFailure, Part
from tierfs.store.counting import FAILURES, RETRIES
from tierfs.store.faulty import Faults, FaultyStore, Rule
from tierfs.store.local import LocalStore
from tierfs.store.retry import RetryingStore, multipart_etag

ABSENT = Condition(if_absent=True)


class Clock:
    """Sleeping is what makes time pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def faulty(tmp_path: Path, faults: Faults, clock: Clock) -> FaultyStore:
    store = FaultyStore(LocalStore(tmp_path), faults, sleep=clock.sleep)
    store.inner.put("k", b"0123456789")
    return store


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def store(faulty: FaultyStore, clock: Clock, metrics: Metrics) -> Iterator[RetryingStore]:
    store = RetryingStore(faulty, timeout_s=60, clock=clock, sleep=clock.sleep, jitter=lambda: 1.0,
                          metrics=metrics)
    yield store
    store.close()


@pytest.mark.parametrize("kind", ["outage", "throttle", "short_body", "hang", "clock_skew", "lost_answer"])
def test_transient_errors_are_repeated(store: RetryingStore, faults: Faults, kind: str) -> None:
    faults.set(Rule(kind=kind, count=3))  # type: ignore[arg-type]
    assert store.get_range("k", 2, 3) == b"234"
    assert store.retries == 3


@pytest.mark.parametrize(
    ("call", "error"),
    [(lambda store: store.head("absent"), ObjectNotFound),
     (lambda store: store.get_range("k", 0, 5, if_match="other"), PreconditionFailed)],
)
def test_answers_are_not_repeated(
    store: RetryingStore, clock: Clock, call: Callable[[RetryingStore], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(store)
    assert clock.pauses == []


def test_refusals_are_not_repeated(store: RetryingStore, faults: Faults, clock: Clock) -> None:
    faults.set(Rule(kind="access_denied"))
    with pytest.raises(StoreAccessDenied):
        store.head("k")
    assert clock.pauses == []


@pytest.mark.parametrize(("kind", "error"), [("outage", StoreUnavailable), ("throttle", StoreThrottled),
                                             ("short_body", ShortBody), ("hang", StoreTimeout)])
def test_the_last_error_is_raised_when_time_is_up(
    store: RetryingStore, faults: Faults, clock: Clock, kind: str, error: type[Exception]
) -> None:
    faults.set(Rule(kind=kind))  # type: ignore[arg-type]
    began = clock.now
    with pytest.raises(error):
        store.get_range("k", 0, 1)
    assert 50 < clock.now - began <= 60


def test_pauses_grow_to_a_bound(store: RetryingStore, faults: Faults, clock: Clock) -> None:
    faults.set(Rule(kind="outage"))
    with pytest.raises(StoreUnavailable):
        store.head("k")
    assert clock.pauses[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    assert max(clock.pauses) == 5.0  # so an outage that ends is noticed within 5 s


def test_pauses_are_jittered(faulty: FaultyStore, faults: Faults, clock: Clock) -> None:
    draws = iter([0.0, 1.0, 0.5])
    store = RetryingStore(faulty, timeout_s=60, clock=clock, sleep=clock.sleep, jitter=lambda: next(draws))
    faults.set(Rule(kind="outage", count=3))
    store.head("k")
    assert clock.pauses == pytest.approx([0.05, 0.2, 0.3])


def test_retry_after_is_honoured(store: RetryingStore, faults: Faults, clock: Clock) -> None:
    faults.set(Rule(kind="throttle", count=1, seconds=17.0))
    store.head("k")
    assert clock.pauses == [17.0]


def test_a_pause_past_the_deadline_is_not_begun(store: RetryingStore, faults: Faults, clock: Clock) -> None:
    faults.set(Rule(kind="throttle", count=1, seconds=61.0))
    with pytest.raises(StoreThrottled):
        store.head("k")
    assert clock.pauses == []


def test_check_gives_up_after_ten_seconds(store: RetryingStore, faults: Faults, clock: Clock) -> None:
    faults.set(Rule(kind="outage"))
    began = clock.now
    with pytest.raises(StoreUnavailable):
        store.check()
    assert clock.now - began <= 10


def test_expired_credentials_are_refreshed_at_once(
    store: RetryingStore, faulty: FaultyStore, faults: Faults, clock: Clock
) -> None:
    faults.set(Rule(kind="expired_token"))
    assert store.head("k").size_bytes == 10
    assert faulty.refreshes == 1
    assert clock.pauses == []


def test_credentials_that_stay_expired_end_in_the_error(clock: Clock, tmp_path: Path) -> None:
    class Stubborn(FaultyStore):
        def refresh_credentials(self) -> None:
            self.refreshes += 1

    stubborn = Stubborn(LocalStore(tmp_path), Faults(Rule(kind="expired_token")))
    store = RetryingStore(stubborn, timeout_s=60, clock=clock, sleep=clock.sleep)
    with pytest.raises(CredentialsExpired):
        store.head("k")
    assert stubborn.refreshes == 1
    assert clock.now - 1000 <= 60


def test_closing_ends_the_waiting(store: RetryingStore, faults: Faults, clock: Clock) -> None:
    faults.set(Rule(kind="outage"))
    store.close()
    with pytest.raises(StoreUnavailable):
        store.head("k")
    assert clock.pauses == []


def test_put_meets_its_own_success(store: RetryingStore, faults: Faults) -> None:
    faults.set(Rule(kind="lost_answer", operation="put", count=1))
    info = store.put("new", b"mine", metadata={"Mode": "1"}, condition=ABSENT)
    assert store.get_range("new", 0, 4, if_match=info.etag) == b"mine"


def test_put_over_a_version_meets_its_own_success(store: RetryingStore, faults: Faults) -> None:
    before = store.head("k")
    faults.set(Rule(kind="lost_answer", operation="put", count=1))
    info = store.put("k", b"after", condition=Condition(if_match=before.etag))
    assert store.get_range("k", 0, 5, if_match=info.etag) == b"after"


@pytest.mark.parametrize(("body", "metadata"), [(b"them", {"mode": "1"}), (b"mine", {"mode": "2"}),
                                                (b"mine!", {"mode": "1"})])
def test_another_writer_is_not_taken_for_oneself(
    store: RetryingStore, faulty: FaultyStore, faults: Faults, body: bytes, metadata: dict[str, str]
) -> None:
    faulty.inner.put("new", body, metadata=metadata)
    faults.set(Rule(kind="outage", operation="put", count=1))
    with pytest.raises(PreconditionFailed):
        store.put("new", b"mine", metadata={"mode": "1"}, condition=ABSENT)


def test_a_condition_that_fails_at_once_is_believed(store: RetryingStore, faulty: FaultyStore) -> None:
    faulty.inner.put("new", b"mine")
    with pytest.raises(PreconditionFailed):
        store.put("new", b"mine", condition=ABSENT)


def test_throttling_leaves_no_doubt(store: RetryingStore, faulty: FaultyStore, faults: Faults) -> None:
    faulty.inner.put("new", b"mine")
    faults.set(Rule(kind="throttle", operation="put", count=1))
    with pytest.raises(PreconditionFailed):
        store.put("new", b"mine", condition=ABSENT)


def test_an_upload_that_others_started_is_left_alone(store: RetryingStore, faults: Faults) -> None:
    other = store.start_multipart("k2")
    faults.set(Rule(kind="throttle", operation="start_multipart", count=1))
    first = store.start_multipart("k")
    second = store.start_multipart("k")
    found = {upload.upload_id for upload in store.list_unfinished_uploads("")}
    assert found == {other, first, second}


def test_complete_meets_its_own_success(store: RetryingStore, faults: Faults) -> None:
    upload = store.start_multipart("multi", metadata={"mtime": "5"})
    parts = [store.upload_part("multi", upload, 1, b"one"), store.upload_part("multi", upload, 2, b"two")]
    faults.set(Rule(kind="lost_answer", operation="complete_multipart", count=1))
    info = store.complete_multipart("multi", upload, parts, condition=ABSENT)
    assert store.get_range("multi", 0, 6, if_match=info.etag) == b"onetwo"


def test_complete_of_an_aborted_upload_is_an_error(store: RetryingStore, faults: Faults) -> None:
    upload = store.start_multipart("multi", metadata={"mtime": "5"})
    part = store.upload_part("multi", upload, 1, b"one")
    store.abort_multipart("multi", upload)
    store.put("multi", b"two")
    faults.set(Rule(kind="outage", operation="complete_multipart", count=1))
    with pytest.raises(ObjectNotFound):
        store.complete_multipart("multi", upload, [part])


def test_copy_meets_its_own_success(store: RetryingStore, faults: Faults) -> None:
    source = store.head("k")
    faults.set(Rule(kind="lost_answer", operation="copy", count=1))
    store.copy(source, "target", metadata={"mode": "3"}, condition=ABSENT)
    assert store.head("target").metadata == {"mode": "3"}


def test_failures_of_a_batch_are_tried_again(store: RetryingStore, faulty: FaultyStore, tmp_path: Path) -> None:
    class Flaky(LocalStore):
        def delete_many(self, keys, etags=None):  # type: ignore[no-untyped-def]
            return [*super().delete_many(keys[1:], etags), DeleteFailure(keys[0], "InternalError")]

    faulty.inner = Flaky(tmp_path)
    for name in "abc":
        store.put(name, b"")
    assert store.delete_many(["a", "b", "c"]) == []
    assert sorted(os.listdir(tmp_path)) == [".tierfs", "k"]


def test_a_replaced_key_is_not_tried_again(store: RetryingStore, faulty: FaultyStore) -> None:
    old = store.put("a", b"ours")
    store.put("a", b"theirs!")
    before = store.counts.by_operation.get("delete", 0)
    (failure,) = store.delete_many(["a", "k"], {"a": old.etag})
    assert (failure.key, failure.replaced) == ("a", True)
    assert store.counts.by_operation.get("delete", 0) == before
    with pytest.raises(PreconditionFailed):
        store.delete("a", if_match=old.etag)


def test_a_failure_that_turns_out_to_be_a_replaced_key(store: RetryingStore, faulty: FaultyStore, tmp_path: Path
                                                       ) -> None:
    class Flaky(LocalStore):
        def delete_many(self, keys, etags=None):  # type: ignore[no-untyped-def]
            return [DeleteFailure(key, "InternalError") for key in keys]

    faulty.inner = Flaky(tmp_path)
    old = store.put("a", b"ours")
    store.put("a", b"theirs!")
    (failure,) = store.delete_many(["a"], {"a": old.etag})
    assert failure.replaced
    assert store.head("a").size_bytes == 7


def test_metrics_and_state(store: RetryingStore, faults: Faults, metrics: Metrics) -> None:
    assert store.failure is None
    faults.set(Rule(kind="outage", count=2), Rule(kind="throttle", count=1))
    store.head("k")
    assert store.failure is None
    values = {(c.name, c.labels): c.value for c in metrics.counters()}
    assert values[RETRIES, (("operation", "head"),)] == 3
    assert values[FAILURES, (("kind", "StoreUnavailable"), ("operation", "head"))] == 2
    faults.set(Rule(kind="outage"))
    with pytest.raises(TransientStoreError):
        store.head("k")
    assert "outage" in (store.failure or "")


def test_multipart_etag() -> None:
    digests = ["d41d8cd98f00b204e9800998ecf8427e", "0cc175b9c0f1b6a831c399e269772661"]
    parts = [Part(number, digest, 1) for number, digest in enumerate(digests, start=1)]
    assert multipart_etag(parts) == "68083ea43d0307eecfa2b4749f19df15-2"
    assert multipart_etag([Part(1, "not hex", 1)]) is None


def test_one_line_per_outage(
    store: RetryingStore, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Log:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def warning(self, text: str, **_: object) -> None:
            self.lines.append(text)

        info = warning

    log = Log()
    monkeypatch.setattr("tierfs.store.retry._log", log)
    for _ in range(5):  # single failures among successes are only counted
        faults.set(Rule(kind="outage", count=2))
        store.head("k")
    assert log.lines == []
    faults.set(Rule(kind="outage"))
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            store.head("k")
    assert log.lines == ["store failing"]
    faults.clear()
    store.head("k")
    store.head("k")
    assert log.lines == ["store failing", "store recovered"]


def test_an_upload_whose_start_was_not_answered_is_not_left_open(store: RetryingStore, faults: Faults) -> None:
    earlier = store.start_multipart("k")
    faults.set(Rule("lost_answer", operation="start_multipart", count=2))
    upload_id = store.start_multipart("k")
    assert {upload.upload_id for upload in store.list_unfinished_uploads("")} == {earlier, upload_id}
    faults.set(Rule("lost_answer", operation="start_multipart", count=1), Rule("access_denied", operation="list_uploads"))
    assert store.start_multipart("k") != upload_id  # what cannot be listed is left
