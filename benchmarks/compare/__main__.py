"""``python -m benchmarks.compare``. Runs best as root, who may drop the caches of the kernel."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.compare import pictures, rounds
from benchmarks.compare.measures import QUICK, TINY, Scale
from benchmarks.compare.peer import MIB, Peer, Site
from benchmarks.compare.peers import PROGRAMS, chosen
from benchmarks.compare.result import CompareResult, Network, PeerAbout, encode
from benchmarks.compare.rounds import Conductor
from benchmarks.compare.stage import Stage, fill, find_binaries, proxied, stage
from benchmarks.servers import ServerFailed
from tierfs.bench.machine import machine
from tierfs.errors import ConfigError
from tierfs.report import print_text, why_no_plots, write_html

NEAR, FAR = "near", "far"
NEAR_SHARE = 0.6
"""Of the time, for the store on loopback; the rest is for the far one."""
NEAR_SHARE_AT_MOST = 0.7
"""Where a single round takes longer than that, it is not finished."""
CLEAN_UP_S = 15.0
"""Kept back at the end for unmounting everything."""
LATEST_END_S = 90.0
"""So long after its time a run is ended from outside of whatever it does."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, in 5 minutes")
    parser.add_argument("--tiny", action="store_true", help="only see whether it works")
    parser.add_argument("--minutes", type=float, help="at most this long (30; with --quick 5)")
    parser.add_argument("--rounds", type=int, help="at most so many (9; with --tiny 1)")
    parser.add_argument(
        "--peers", default="", help="only these, by name, with commas (default: all that are here)"
    )
    parser.add_argument("--minio", metavar="BINARY", help="MinIO as the store instead of SeaweedFS")
    parser.add_argument(
        "--binary",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="where a program is: mount-s3, goofys...",
    )
    parser.add_argument(
        "--binaries", type=Path, action="append", default=[], help="a directory with programs"
    )
    parser.add_argument("--delay-ms", type=float, default=20.0, help="round trip to the far store (20)")
    parser.add_argument(
        "--rate-mib", type=float, default=50.0, help="MiB/s per connection to it (50; 0: no limit)"
    )
    parser.add_argument("--no-far", action="store_true", help="only the near store")
    parser.add_argument("--cache-mib", type=int, help="local cache of each peer (4096; with --quick 1024)")
    parser.add_argument(
        "--work-dir", type=Path, help="on the disk to be measured (default: a temporary directory)"
    )
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--html", type=Path, help="write the report with plots to this file")
    options = parser.parse_args(arguments)
    for text in options.binary:
        if "=" not in text:
            parser.error(f"--binary: {text!r} is not NAME=PATH")
    options.rounds = options.rounds or (1 if options.tiny else 9)
    if options.html and (missing := why_no_plots()):
        parser.error(f"--html: {missing}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # Told to stop, it still cleans up; and it tells itself to, should anything not obey its own limit.
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)
    signal.alarm(int(allowed_minutes(options) * 60 + LATEST_END_S))
    scale = TINY if options.tiny else QUICK if options.quick else Scale()
    work_dir = Path(tempfile.mkdtemp(prefix="tierfs-compare-", dir=options.work_dir))
    try:
        result = run(options, scale, work_dir)
    except (ServerFailed, ConfigError) as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks.compare: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    report = pictures.report(result)
    print_text(report)
    if options.json:
        options.json.write_bytes(encode(result))
    if options.html:
        write_html(report, options.html)
    return 0


def allowed_minutes(options: argparse.Namespace) -> float:
    given: float | None = options.minutes
    return given or (5.0 if options.quick or options.tiny else 30.0)


def run(options: argparse.Namespace, scale: Scale, work_dir: Path) -> CompareResult:
    """Everything, in ``work_dir``. Raises ServerFailed, ConfigError."""
    began = time.monotonic()
    deadline = began + allowed_minutes(options) * 60 - CLEAN_UP_S
    classes = chosen([name for name in options.peers.split(",") if name])
    given = {
        name: os.path.abspath(path) for name, _, path in (text.partition("=") for text in options.binary)
    }
    binaries = find_binaries(options.binaries, [*PROGRAMS, "redis-server"], given)
    cache_bytes = (options.cache_mib or (1024 if options.quick or options.tiny else 4096)) * MIB
    result = CompareResult(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", *sys.orig_argv[1:]]),
        machine=machine(),
        server="",
        server_command="",
        scale=scale.described(),
        cold=_cold_means(),
    )
    minio = os.path.abspath(options.minio) if options.minio else None
    with stage(work_dir, cache_bytes, binaries, minio) as found:
        result.server = found.site.server.name
        result.server_command = shlex.join(found.site.server.command)
        candidates = [make(found.site) for make in classes]
        for peer in candidates:
            missing = peer.missing()
            about = PeerAbout(name=peer.name, left_out=missing or "")
            if not missing:
                about.version, about.command = peer.version(), shlex.join(peer.mount_command())
            else:
                say(f"without {peer.name}: {missing}")
            result.peers.append(about)
        fill(found, [peer for peer in candidates if not _about(result, peer).left_out], scale, say)
        for name, reason in found.left_out.items():
            next(each for each in result.peers if each.name == name).left_out = reason
        near = Network(name=NEAR)
        far = Network(name=FAR, delay_ms=options.delay_ms, rate_mib=options.rate_mib)
        shaped = not options.no_far and bool(far.delay_ms or far.rate_mib)
        now = time.monotonic()
        until, latest = (
            now + (deadline - now) * (share if shaped else 1.0) for share in (NEAR_SHARE, NEAR_SHARE_AT_MOST)
        )
        _measure(result, near, found, found.site, scale, classes, options.rounds, until, latest)
        if shaped:
            with proxied(found.site, found.marks["proxy"], far.delay_ms, far.rate_mib) as site:
                _measure(result, far, found, site, scale, classes, options.rounds, deadline, deadline)
    result.seconds = time.monotonic() - began
    result.load_after = os.getloadavg()[0]
    return result


def _measure(
    result: CompareResult,
    network: Network,
    found: Stage,
    site: Site,
    scale: Scale,
    classes: Sequence[type[Peer]],
    most_rounds: int,
    until_s: float,
    deadline_s: float,
) -> None:
    result.networks.append(network)
    running = result.running()
    peers = [make(site) for make in classes if make.name in running]
    conductor = Conductor(
        result, network, scale, peers, found.marks, deadline_s, found.warm_server, found.stored_bytes, say,
        first_number=100 * (len(result.networks) - 1),
    )  # fmt: skip
    with conductor.all_mounted():
        conductor.run(most_rounds, until_s)


def _about(result: CompareResult, peer: Peer) -> PeerAbout:
    return next(each for each in result.peers if each.name == peer.name)


def _cold_means() -> str:
    if rounds.may_drop():
        return "warm: the caches of the kernel have been dropped (drop_caches)"
    return "warm: nothing has been dropped, since that takes root; it is the same as hot"


def say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
