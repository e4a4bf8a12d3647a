"""Runs in which one thing is slow all the time: the first finding names it, and what it costs. Clean runs have none."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def reports_of(server: ServerProcess, runs: Sequence[Planted]) -> list[Json]:
    """Run them all at the same time; most of it is waiting."""
    with ThreadPoolExecutor(len(runs)) as threads:
        return list(threads.map(lambda planted: profile(planted.go(server)), runs))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_the_first_finding_names_what_is_slow_all_the_time(server: ServerProcess, row: type[Planted]) -> None:
    runs = [row(seed) for seed in SEEDS]
    for planted, report in zip(runs, reports_of(server, runs), strict=True):
        check(planted, report)


def test_the_first_finding_names_a_slow_disk(make_server: MakeServer, tmp_path: Path) -> None:
    # A server for each: runs on one disk would wait for each other's syncs.
    path = str(Path(__file__).parent / "slow_disk")
    runs = [SlowDisk(seed) for seed in SEEDS]
    servers = [make(make_server, tmp_path / str(seed), PYTHONPATH=path, SYNC_S=str(SlowDisk.sync_s)) for seed in SEEDS]
    with ThreadPoolExecutor(len(runs)) as threads:
        reports = list(threads.map(lambda server, planted: profile(planted.go(server)), servers, runs))
    for planted, report in zip(runs, reports, strict=True):
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
    for planted, report in zip(runs, reports_of(server, runs), strict=True):
        assert not report["findings"], (planted.truth(), report["findings"])
