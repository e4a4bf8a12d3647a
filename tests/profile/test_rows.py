"""Runs in which one thing is slow all the time: the first finding names it, and what it costs. Clean runs have none."""

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess
from tests.profile.planting import TASKS, Planted, profile
from tests.profile.rows import (
    AllFail,
    AllInvalid,
    Clean,
    CleanAsync,
    CleanKept,
    ColdCache,
    FailingTool,
    OtherRun,
    SlowDisk,
    SlowEngine,
    SlowingEngine,
    SlowNetwork,
    SlowTool,
    SmallReads,
)

pytestmark = pytest.mark.profile

SEEDS = (1, 2, 3)
NUM_TRIES = 3
TICK_S, STANDSTILL_S = 0.05, 0.3
"""What costs less than the second is below every finding."""
ROWS: tuple[type[Planted], ...] = (
    SlowEngine,
    SlowingEngine,
    SlowNetwork,
    ColdCache,
    AllFail,
    AllInvalid,
    FailingTool,
    SmallReads,
    OtherRun,
    SlowTool,
)


def make(make_server: MakeServer, folder: Path, **env: str) -> ServerProcess:
    tasks = Path(shutil.copytree(TASKS, folder / "tasks"))
    return make_server(generators=tasks, start_wait_s=60, env=env)


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    return make(module_servers, tmp_path_factory.mktemp("rows"))


class Standstill:
    """Measures, within the ``with`` block, the longest time for which this machine stood still."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._measure)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _measure(self) -> None:
        begun_s = time.monotonic()
        while not self._is_over.wait(TICK_S):
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - begun_s - TICK_S)
            begun_s = now_s


def reports_of(servers: Sequence[ServerProcess], runs: Sequence[Planted]) -> Iterator[tuple[Planted, Json]]:
    """Run them all at the same time, since most of it is waiting; each with its report.

    A machine that stands still meanwhile is a fault, too, and a profile may name it: then they run once more.
    """
    for _ in range(NUM_TRIES):
        runs = [type(each)(each.seed) for each in runs]
        with Standstill() as standstill, ThreadPoolExecutor(len(runs)) as threads:
            reports = list(threads.map(lambda planted, server: profile(planted.go(server)), runs, servers))
        if standstill.longest_s < STANDSTILL_S:
            break
    return zip(runs, reports, strict=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_the_first_finding_names_what_is_slow_all_the_time(server: ServerProcess, row: type[Planted]) -> None:
    runs = [row(seed) for seed in SEEDS]
    for planted, report in reports_of([server] * len(runs), runs):
        check(planted, report)


def test_the_first_finding_names_a_slow_disk(make_server: MakeServer, tmp_path: Path) -> None:
    # A server for each: runs on one disk would wait for each other's syncs.
    path = str(Path(__file__).parent / "slow_disk")
    runs = [SlowDisk(seed) for seed in SEEDS]
    servers = [make(make_server, tmp_path / str(seed), PYTHONPATH=path, SYNC_S=str(SlowDisk.sync_s)) for seed in SEEDS]
    for planted, report in reports_of(servers, runs):
        check(planted, report)


def check(planted: Planted, report: Json) -> None:
    told = [f"{finding['seconds']:.2f} s: {finding['sentence']}" for finding in report["findings"]]
    assert told, planted.truth()
    first = report["findings"][0]
    path = first["path"]
    assert first["cause"] == planted.cause, (planted.truth(), told)
    assert path.get("worker", "") == planted.worker or not planted.worker, (planted.truth(), told)
    assert path.get("event", "") == planted.event or not planted.event, (planted.truth(), told)
    step = None if first["share_of"] == "run" else path["step"]
    assert planted.is_cost(first["seconds"], step), (planted.truth(), told)
    for word in planted.in_sentence:
        assert word in first["sentence"], told
    if planted.is_only_finding:
        assert len(told) == 1, told


def test_a_run_in_which_nothing_is_slow_has_no_finding(server: ServerProcess) -> None:
    runs = [Clean(1), Clean(2), CleanKept(3), CleanAsync(4), CleanAsync(5)]
    for planted, report in reports_of([server] * len(runs), runs):
        assert not report["findings"], (planted.truth(), report["findings"])
