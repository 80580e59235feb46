"""What all tests share: above all one real Slurm cluster for the whole session."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
# A test may need as many threads as ranks; more would only fight for the cores and change timings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def take_signals_back() -> None:
    """Whatever started the tests: signals do what they do in a process that was started by hand.

    A shell lets its background jobs ignore SIGINT, nohup lets them ignore SIGHUP, and both go on to all children: the
    runs that the tests stop by these signals would never notice them.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        # Children get the default; the tests themselves go on when the terminal is closed, as nohup is to see to.
        signal.SIGHUP: lambda number, frame: None,
    }
    # Python itself ignores these two, and gives them back to its children.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handlers.get(number, signal.SIG_DFL))


take_signals_back()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, a skip for a missing tool is a failure: there, everything must be installed."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("CI") and item.get_closest_marker("may_skip") is None:
        report.outcome = "failed"
        report.longrepr = f"CI must run this test, and it was skipped: {report.longrepr}"
    return report


def missing_for_slurm() -> str | None:
    """Why no real Slurm can be started here, or None when it can."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root (network namespaces)"
    absent = [tool for tool in ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare") if not shutil.which(tool)]
    if absent:
        return f"not installed: {', '.join(absent)} (slurm/minicluster install)"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        return "this machine allows no network namespaces"
    return None


@pytest.fixture(scope="session")
def minicluster() -> Iterator[object]:
    """A real Slurm of three nodes with accounting, up for the whole session: a `mini.Cluster`."""
    reason = missing_for_slurm()
    if reason is not None:
        pytest.skip(reason)
    from mini import Cluster

    cluster = Cluster(name=f"tests{os.getpid()}")
    cluster.up()
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of packed tokens for the session, so that only the first test packs."""
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def python() -> str:
    """The interpreter that runs the tests, for the commands that a test types."""
    return sys.executable
