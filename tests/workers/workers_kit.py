"""Jobs of a test's own process that workers run: the same functions, in threads of two inline workers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forebay.generators.job import run_job
from forebay.generators.job.composition import Composition, compose_here, composition
from forebay.workers.backends.abc import RunningWorker, WorkerSpec
from forebay.workers.backends.inline import InlineBackend
from forebay.workers.members.worker import ClassWithInitArgs
from forebay.workers.rollouts.lead import RunWorkers
from forebay.workers.rollouts.rollout_worker import RolloutWorker
from forebay.workers.rollouts.supervisor import StartWorker


class CallingWorker(RolloutWorker):
    """Calls a function in place of a file's ``run_rollout``."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._given = call
        super().__init__({"module_path": "", "original_folder": "", "payload": {}})

    def _call_run_rollout(self) -> None:
        self._given()


def starter(call: Callable[[], object], num_workers: int, started: list[RunningWorker]) -> StartWorker:
    """Starts inline workers that call ``call``; each is added to ``started``."""

    def start(number: int) -> RunningWorker:
        classes = {"": ClassWithInitArgs(CallingWorker, call)}
        (worker,) = InlineBackend().start([WorkerSpec(number, num_workers, number, num_workers, 0, classes)])
        started.append(worker)
        return worker

    return start


def run_over_workers(monkeypatch: pytest.MonkeyPatch, num_workers: int = 2) -> list[RunningWorker]:
    """From now on the jobs of this test have workers: those that were started."""
    started: list[RunningWorker] = []
    original = run_job.run

    async def run(*arguments: Any) -> Any:
        if composition().member is not None:
            return await original(*arguments)
        places = RunWorkers(starter(lambda: asyncio.run(original(*arguments)), num_workers, started), num_workers)
        compose_here(Composition(places=places))
        try:
            return await original(*arguments)
        finally:
            compose_here(Composition())
            await asyncio.to_thread(places.close, 5.0)

    monkeypatch.setattr(run_job, "run", run)
    return started
