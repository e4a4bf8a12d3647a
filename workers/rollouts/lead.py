"""The lead of a run with workers, over all of its jobs."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict

from forebay.generators.job.ports import JobPlaces, JobSurroundings
from forebay.generators.job.reporter import Totals
from forebay.workers.rollouts.reach import NeededAddresses
from forebay.workers.rollouts.remote_job import RemoteJob
from forebay.workers.rollouts.supervisor import StartWorker, WorkerSupervisor


class RunWorkers:
    """The ``RolloutPlaces`` of a run: ``num_workers`` of them, which ``start`` starts with the first job.

    They live as long as ``run_rollout``: each has its own, which goes on where the lead's does. ``reach`` is what they
    need where they may be on other machines.
    """

    def __init__(self, start: StartWorker, num_workers: int, reach: NeededAddresses | None = None) -> None:
        self._workers = WorkerSupervisor(start, num_workers)
        self._reach = reach
        self._num_ended = 0

    async def need(self, field: str, url: Callable[[], Awaitable[str]]) -> None:
        """Of ``RolloutPlaces``, as all below."""
        if self._reach is not None:
            self._reach.need(field, await url())

    @asynccontextmanager
    async def opened(self, around: JobSurroundings) -> AsyncIterator[JobPlaces]:
        """What a job has of its workers."""
        addresses = self._reach.addresses if self._reach is not None else []
        job = RemoteJob(around, self._workers, self._num_ended, addresses)
        self._workers.attach(job)
        try:
            yield job.places
        finally:
            await self._workers.detach()
            await job.close()

    def end_job(self, totals: Totals | None) -> None:
        """The workers get past this job, too, and those that come later pass it at once."""
        self._num_ended += 1
        self._workers.end_job(None if totals is None else asdict(totals))

    def close(self, drain_s: float) -> None:
        """``run_rollout`` has returned: so will those of the workers, which have so long for it."""
        self._workers.close(drain_s)
