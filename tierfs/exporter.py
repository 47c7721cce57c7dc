"""Prometheus text over HTTP: ``GET /metrics`` of one mount, and ``GET /healthz``.

Owns: the listening socket of ``--metrics ADDR``. Runs in the engine's trio thread; a collection calls the
gauges' ``read`` functions there, so they see consistent state, and must be quick.

Raises: ``ConfigError`` when the address cannot be bound. A client cannot make it raise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from tierfs import __version__
from tierfs.errors import ConfigError
from tierfs.log import get_logger
from tierfs.metrics import Counter, Gauge, Metrics

log = get_logger(__name__)

T = TypeVar("T", Counter, Gauge)

PREFIX = "tierfs_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 32


class MetricsCollector(Collector):
    """Presents ``Metrics`` to prometheus_client; ``labels`` go on every sample."""

    def __init__(self, metrics: Metrics, labels: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            f"{PREFIX}info", "1; the version is a label.", labels=["version", *self._labels]
        )
        info.add_metric([__version__, *self._labels.values()], 1)
        yield info
        for counters in _families(self._metrics.counters()):
            counter_family = CounterMetricFamily(
                _full_name(counters[0].name), counters[0].help, labels=self._label_names(counters)
            )
            for counter in counters:
                counter_family.add_metric(self._label_values(counter, counters), counter.value)
            yield counter_family
        for gauges in _families(self._metrics.gauges()):
            gauge_family = GaugeMetricFamily(
                _full_name(gauges[0].name), gauges[0].help, labels=self._label_names(gauges)
            )
            for gauge in gauges:
                try:
                    value = gauge.read()
                except Exception:
                    log.exception("a gauge cannot be read", gauge=gauge.name)
                    continue
                gauge_family.add_metric(self._label_values(gauge, gauges), value)
            yield gauge_family

    def _label_names(self, family: Sequence[Counter | Gauge]) -> list[str]:
        own = dict.fromkeys(name for member in family for name, _ in member.labels)
        return [*self._labels, *own]

    def _label_values(self, member: Counter | Gauge, family: Sequence[Counter | Gauge]) -> list[str]:
        have = self._labels | dict(member.labels)
        return [have.get(name, "") for name in self._label_names(family)]


def _full_name(name: str) -> str:
    return name if name.startswith(PREFIX) else PREFIX + name


def _families(members: Iterable[T]) -> list[list[T]]:
    """Group by name: Prometheus wants all samples of one name together."""
    grouped: dict[str, list[T]] = defaultdict(list)
    for member in members:
        grouped[member.name].append(member)
    return list(grouped.values())


def render(metrics: Metrics, labels: Mapping[str, str]) -> bytes:
    """All counters and gauges in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(metrics, labels))
    return generate_latest(registry)


async def serve(
    address: str,
    metrics: Metrics,
    labels: Mapping[str, str],
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer on ``HOST:PORT`` until cancelled; ``started()`` tells the address that was bound."""
    host, _, port = address.rpartition(":")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]"))
    except OSError as error:
        raise ConfigError(f"metrics: cannot listen on {address}: {error.strerror or error}") from error
    limit = trio.CapacityLimiter(MAX_CONNECTIONS)

    async def handle(stream: trio.SocketStream) -> None:
        try:
            async with stream, limit:
                with trio.move_on_after(REQUEST_TIMEOUT_S):
                    await stream.send_all(_respond(await _request_line(stream), metrics, labels))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Exception:
            log.exception("metrics request failed")

    bound = listeners[0].socket.getsockname()
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, handle, listeners)
        task_status.started(f"{bound[0]}:{bound[1]}")


async def _request_line(stream: trio.SocketStream) -> bytes:
    """The first line of the request, after all of its header has arrived; empty if it is no HTTP."""
    data = bytearray()
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        chunk = await stream.receive_some(4096)
        if not chunk or len(data) + len(chunk) > MAX_REQUEST_BYTES:
            return b""
        data += chunk
    return bytes(data.split(b"\n", 1)[0].strip())


def _respond(line: bytes, metrics: Metrics, labels: Mapping[str, str]) -> bytes:
    method, _, rest = line.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    status, kind, body = "404 Not Found", "text/plain", b"try /metrics\n"
    if method not in {b"GET", b"HEAD"}:
        status, body = ("405 Method Not Allowed" if line else "400 Bad Request"), b""
    elif path == b"/metrics":
        status, kind, body = "200 OK", CONTENT_TYPE, render(metrics, labels)
    elif path == b"/healthz":
        status, body = "200 OK", b"ok\n"
    fields = [f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
    head = "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""])
    return head.encode("ascii") + (b"" if method == b"HEAD" else body)
