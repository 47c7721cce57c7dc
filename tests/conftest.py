"""Shared fixtures, and how the tests are arranged.

====================  =================================================================================
``unit``              no mount, no network, injected clock
``native``            the parts in C: their unit tests and fuzzers, built with sanitizers
``contract``          one suite against every store, one against every tier
``model``             hypothesis state machines against a plain model
``mount``             a real FUSE mount: POSIX behaviour, persistence, life cycle, tools
``semantics``         every promise of ``tierfs/SEMANTICS.md``, quoted
``faults``            failing stores, kill -9, full disks
``cases``             faults that users met in other products, by number
``support``           what these share
====================  =================================================================================

``--front`` chooses what serves the mounts: ``both`` (default), ``python``, ``native``, or ``plain``, an ordinary
directory: whatever the POSIX tests demand, the local file system must do as well.

With pytest-xdist (``-n 4 --dist worksteal``) several processes, the workers, share one run: see
``tests.support.run``. Each has a shared mount and directories of its own; the S3 server and the native build are
common to all. A test that says something about the whole machine is marked ``alone``: no other one runs beside it.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import run, weed
from tests.support.mount import Mounted, MountFactory, fuse_missing, native_missing, remove_tree, watchdog

LIMIT_S = 150.0
MOUNTING = {"mount_factory", "mounted", "shared_mount", "workdir"}

_numbers = itertools.count(1)
_trouble: list[str] = []
"""What makes the run fail although no test did: a worker that died, something left behind."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--front", choices=("both", "python", "native", "plain"), default="both", help="serves the mounts"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that mounts runs once per front."""
    if "front" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--front")
    fronts = ["python", "native"] if asked == "both" else [asked]
    if asked == "both" and not os.environ.get("TIERFS_NEED_NATIVE") and native_missing():
        fronts = ["python"]
    metafunc.parametrize("front", fronts, indirect=True, scope="session")


def pytest_configure(config: pytest.Config) -> None:
    # A run that is told to stop still unmounts what it mounted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    # Only in a worker of pytest-xdist; the process that starts them comes here first.
    told: dict[str, str] | None = getattr(session.config, "workerinput", None)
    if told is None:
        run.begin()
    else:
        run.join(Path(told["run_directory"]), told["workerid"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker is about to be started."""
    node.workerinput["run_directory"] = str(run.directory())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """A worker has ended. One that died is replaced, and its test failed; what it left burdens nobody any more."""
    if error is not None:
        _trouble.append(f"worker {node.gateway.id} died: {error}")
        _trouble.extend(run.clear(run.directory() / node.gateway.id))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last test, and after the last worker."""
    if hasattr(session.config, "workerinput"):
        return
    weed.stop_shared()
    _trouble.extend(f"left behind, {what}" for what in run.clear(run.directory()))
    remove_tree(run.directory())
    if _trouble and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _trouble:
        terminalreporter.section("the run failed, whatever its tests say", red=True)
        for line in _trouble:
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs FUSE where there is none, saying why; keep the quick floors first."""
    floors = ["unit", "native", "contract", "model", "semantics", "mount", "cases", "faults"]
    here = Path(__file__).parent

    def floor(item: pytest.Item) -> int:
        first = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return floors.index(first) if first in floors else 0

    def front_of(item: pytest.Item) -> str:
        return str(item.callspec.params.get("front", "")) if hasattr(item, "callspec") else ""

    items.sort(key=lambda item: (floor(item), front_of(item)))
    reason = None if config.getoption("--front") == "plain" else fuse_missing()
    for item in items:
        needs_mount = bool(MOUNTING & set(getattr(item, "fixturenames", ()))) or item.get_closest_marker(
            "needs_fuse"
        )
        if needs_mount and reason:
            item.add_marker(pytest.mark.skip(reason=f"no FUSE here: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    marker = item.get_closest_marker("limit_s")
    with run.machine(alone=item.get_closest_marker("alone") is not None):
        with watchdog(float(marker.args[0]) if marker else LIMIT_S):
            return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A failed test shows the end of the log of each mount that it used."""
    report = yield
    if report.failed:
        values = getattr(item, "funcargs", {})
        for mounted in [v for v in values.values() if isinstance(v, Mounted)] + list(
            values.get("mount_factory", ())
        ):
            if not mounted.is_plain:
                report.sections.append((f"log of the mount at {mounted.path}", mounted.log_tail()))
    return report


@pytest.fixture(scope="session")
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def session_dir() -> Iterator[Path]:
    """A directory that every user can pass through, unlike pytest's own; no other process of the run uses it."""
    path = run.own_directory()
    yield path
    remove_tree(path)


@pytest.fixture
def base_dir(session_dir: Path) -> Iterator[Path]:
    """A fresh directory for one test, removed after it."""
    path = session_dir / f"b{next(_numbers)}"
    path.mkdir(mode=0o755)
    yield path
    remove_tree(path)


@pytest.fixture
def mount_factory(base_dir: Path, front: str) -> Iterator[MountFactory]:
    factory = MountFactory(base_dir, front)
    yield factory
    factory.close()


@pytest.fixture
def mounted(mount_factory: MountFactory) -> Mounted:
    """A mount of its own for one test, with the default settings."""
    return mount_factory()


@pytest.fixture(scope="session")
def shared_mount(session_dir: Path, front: str) -> Iterator[Mounted]:
    """One mount for the many small tests of POSIX behaviour; see ``workdir``."""
    mounted = Mounted(session_dir / f"shared-{front}", front=front)
    mounted.start()
    yield mounted
    mounted.close()


@pytest.fixture
def workdir(shared_mount: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory in the shared mount. The test fails if the mount dies or logs a traceback.

    After a death the mount is started again, so that one fault fails one test.
    """
    if not shared_mount.is_plain and shared_mount.process is None:
        shared_mount.start()
    path = shared_mount.path / f"w{next(_numbers)}"
    path.mkdir()
    path.chmod(0o755)
    yield path
    if shared_mount.process is not None and shared_mount.process.poll() is not None:
        shared_mount.kill9()
        pytest.fail(f"the engine died during this test\n{shared_mount.log_tail()}")
    shared_mount.check_log()


@pytest.fixture
def other_user() -> tuple[int, int]:
    """Ids of a user who owns nothing; the test needs root to become that user."""
    if os.geteuid() != 0:
        pytest.skip("acting as another user needs root")
    return 12345, 12346


@pytest.fixture
def needs_mount(front: str) -> None:
    """For tests that say nothing about a plain directory."""
    if front == "plain":
        pytest.skip("about a real mount, not about a plain directory")


@pytest.fixture
def one_front(front: str) -> None:
    """For tests of what has nothing to do with the front: the native one where it is there."""
    if front == "python" and not native_missing():
        pytest.skip("the same with both fronts")
