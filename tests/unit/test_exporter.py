"""The Prometheus exporter."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine import drained, running_engine, settings_for
from tierfs import exporter
from tierfs.errors import ConfigError
from tierfs.metrics import Metrics
from tierfs.mount import gauges
from tierfs.store.faulty import Faults, FaultyStore, Rule

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def metrics() -> Metrics:
    found = Metrics()
    found.counter("tierfs_store_requests_total", "Requests sent.", operation="get").add(3)
    found.counter("tierfs_cache_hit_bytes_total", "Bytes.", tier="ram").add(5)
    found.counter("tierfs_store_requests_total", "Requests sent.", operation="put").add(4)
    found.counter("reads_total", "No prefix, no labels.").add(1)
    found.gauge("tierfs_tier_used_bytes", "Used.", lambda: 7.5, tier="ram")
    return found


@pytest.fixture
async def address(metrics: Metrics) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(exporter.serve, "127.0.0.1:0", metrics, {"mountpoint": "/mnt/a"}))
        nursery.cancel_scope.cancel()


async def ask(address: str, request: bytes) -> tuple[str, bytes]:
    host, port = address.split(":")
    answer = bytearray()
    with trio.fail_after(30):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(request)
            while chunk := await stream.receive_some(65536):
                answer += chunk
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def test_counters_and_gauges_of_one_name_are_one_family(metrics: Metrics) -> None:
    text = exporter.render(metrics, {"mountpoint": "/mnt/a"})
    assert text.count(b"# TYPE tierfs_store_requests_total counter") == 1
    found = samples(text)
    here = ("mountpoint", "/mnt/a")
    assert found[("tierfs_store_requests_total", (here, ("operation", "get")))] == 3
    assert found[("tierfs_store_requests_total", (here, ("operation", "put")))] == 4
    assert found[("tierfs_tier_used_bytes", (here, ("tier", "ram")))] == 7.5
    assert found[("tierfs_reads_total", (here,))] == 1


def test_a_gauge_that_fails_hides_no_other(metrics: Metrics) -> None:
    def broken() -> float:
        raise ZeroDivisionError

    metrics.gauge("tierfs_tier_used_bytes", "Used.", broken, tier="nvme")
    assert [
        value for (name, _), value in samples(exporter.render(metrics, {})).items() if "used" in name
    ] == [7.5]


async def test_metrics_over_http(address: str, metrics: Metrics) -> None:
    status, body = await ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert body == exporter.render(metrics, {"mountpoint": "/mnt/a"})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", "200 OK"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "200 OK"),
        (b"GET /metrics?x=1 HTTP/1.0\n\n", "200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"\r\n\r\n", "400 Bad Request"),
    ],
)
async def test_other_requests_are_answered_too(address: str, request_: bytes, status: str) -> None:
    assert (await ask(address, request_))[0] == f"HTTP/1.1 {status}"


async def test_an_endless_request_is_cut_off(address: str) -> None:
    try:
        answer = (await ask(address, b"x" * 1_000_000))[0]
    except trio.BrokenResourceError:  # cut off while it was still sending
        answer = "HTTP/1.1 400 Bad Request"
    assert answer == "HTTP/1.1 400 Bad Request"
    assert (await ask(address, b"GET /healthz HTTP/1.1\r\n\r\n"))[1] == b"ok\n"


async def test_an_address_in_use_is_a_config_error(address: str, metrics: Metrics) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        await exporter.serve(address, metrics, {})


async def test_readme_and_a_mount_name_the_same_metrics(tmp_path: Path) -> None:
    faults = Faults()
    async with running_engine(settings_for(tmp_path), wrap=lambda store: FaultyStore(store, faults)) as engine:
        gauges.register(engine.parts)
        faults.set(Rule(kind="outage", count=1))  # some counters exist from the first event only
        await engine.write_file("f", b"1")
        await drained(engine)
        text = exporter.render(engine.parts.metrics, {"mountpoint": "/mnt/a"}).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    _, _, section = README.read_text("utf-8").partition("### Metrics")
    table, _, _ = section.partition("\n## ")
    named = re.findall(r"`(tierfs_\w+)`", table)
    assert sorted(named) == sorted({sample.name for sample in samples})
    labels = {name for sample in samples for name in sample.labels}
    assert labels == {"mountpoint", "version", "tier", "operation", "kind", "stage"}
    assert all(f"`{name}`" in table for name in labels - {"version"})
