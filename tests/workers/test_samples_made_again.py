"""A sample that was lost on its way with its worker: its slot is filled in any case, and the job comes to its end."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.client.sample_writer.outbox import Sample
from forebay.core.clock import ActiveClock, SystemClock
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.task_row import parse_row
from forebay.generators.buffer_link.abc import Plan
from forebay.generators.job.ports import JobContext
from forebay.generators.rollouts.open_group import GroupPlan, StepBarrier
from forebay.telemetry.tracing.tracer import NO_TRACE
from forebay.workers.rollouts.orders import Done, encode
from forebay.workers.rollouts.remote_job import RemoteJob
from forebay.workers.rollouts.remote_runner import RemoteRollout
from forebay.workers.rollouts.run_worker import RunWorker
from forebay.workers.rollouts.supervisor import WorkerSupervisor

UID = "abc"
LIMIT_S = 60.0


class OwnWriter:
    """The lead's: keeps what it is given, and says at once that it is on the disk."""

    def __init__(self, on_judged: Callable[[Sample], None]) -> None:
        self.written: list[Sample] = []
        self._on_judged = on_judged

    async def write(self, sample: Sample) -> None:
        self.written.append(sample)
        self._on_judged(sample)

    async def close(self) -> None: ...

    async def stop(self) -> None: ...


class Job:
    """One whose only rollout has ended, and lost its worker before its sample got a slot."""

    def __init__(self) -> None:
        self.own: OwnWriter
        self.workers = WorkerSupervisor(lambda _: pytest.fail("nothing is started"), 1)
        around = SimpleNamespace(
            plan=Plan("run-1", 1, 60.0, 60.0),
            link=SimpleNamespace(writer=self._writer),
            pool=None,
            reporter=SimpleNamespace(watch_workers=lambda _: None),
            clock=ActiveClock(SystemClock()),
            hold=StepBarrier(),
            loads=EngineLoads(1),
            tracer=NO_TRACE,
            queue_size=1,
        )
        self.job = RemoteJob(cast("JobContext", around), self.workers, 0, [])
        plan = GroupPlan(parse_row(b'{"prompt": "a", "instance_id": "a"}', 0), 0, (0,), (0,))
        self.job._rollouts[UID] = RemoteRollout(UID, plan, 0, 0)

    def _writer(self, queue_size: int, on_judged: Callable[[Sample], None]) -> OwnWriter:
        self.own = OwnWriter(on_judged)
        return self.own

    async def end(self) -> dict[str, Any]:
        """Give the sample its slot, and close the job; what it wrote itself."""
        async with asyncio.timeout(LIMIT_S):
            await self.job.places.writer.write({"uid": UID, "slot": 0})
            await self.job.places.writer.close()
        (sample,) = self.own.written
        return dict(sample)


async def test_one_whose_workers_all_die_is_written_by_the_lead_and_the_job_ends() -> None:
    job = Job()
    job.workers.deaths[UID] = 3
    job.workers.last_reason = "its process was killed by SIGKILL"
    sample = await job.end()
    assert (sample["slot"], sample["status"], sample["outcome"]) == (0, "failed", "environment_failure")
    assert "SIGKILL" in sample["error"]["message"]


async def test_one_that_takes_too_long_when_it_is_made_again_is_written_by_the_lead_and_the_job_ends() -> None:
    job = Job()

    class Slow(RunWorker):
        async def call(self, method: str, *args: Any) -> Any:
            assert method == "rollout"
            return encode(Done("closed", [], {}, ""))

    slow = Slow(0)
    slow.state = "ready"
    job.workers.members = [slow]
    sample = await job.end()
    assert (sample["slot"], sample["status"]) == (0, "failed")
    assert "exceeded the group's time limit" in sample["error"]["message"]


async def test_one_that_no_worker_can_deliver_is_written_by_the_lead_and_the_job_ends() -> None:
    job = Job()

    class Refusing(RunWorker):
        async def call(self, method: str, *args: Any) -> Any:
            if method == "rollout":
                return encode(Done("completed", [1], {}, ""))
            raise TypeError("the sample cannot be JSON")

        def kill(self) -> None:
            self.state = "ready"  # the next one does no better

    refusing = Refusing(0)
    refusing.state = "ready"
    job.workers.members = [refusing]
    sample = await job.end()
    assert (sample["slot"], sample["status"], sample["outcome"]) == (0, "failed", "environment_failure")
    assert "cannot be JSON" in sample["error"]["message"]
