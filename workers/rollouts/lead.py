"""The lead of a run with workers: how they are started, one by one, and what its jobs have of them."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

from forebay.generators.job.ports import JobContext, JobPlaces
from forebay.generators.job.reporter import Totals
from forebay.generators.process.spec import RunSpec
from forebay.workers.backends.abc import RunningWorker, WorkerBackend
from forebay.workers.members.worker import ClassWithInitArgs
from forebay.workers.members.worker_spec import worker_specs
from forebay.workers.rollouts.other_nodes import NeededAddresses, pack_code
from forebay.workers.rollouts.remote_job import RemoteJob
from forebay.workers.rollouts.rollout_worker import RolloutWorker
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
    async def opened(self, around: JobContext) -> AsyncIterator[JobPlaces]:
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


def worker_starter(spec: RunSpec) -> StartWorker:
    """Starts the worker of a number, for the first time or again, as ``workers`` and ``backend`` of the run say.

    Raises what keeps the backend from being used at all.
    """
    backend = _backend(spec)
    code = pack_code(spec) if backend.name == "ray" else b""
    classes = {"": ClassWithInitArgs(RolloutWorker, asdict(replace(spec, workers=[])), code)}
    specs = worker_specs(spec.workers, classes)
    one_at_a_time = threading.Lock()
    """The first of a node takes the places of all of them on a cluster: two at once would both do."""

    def start(number: int) -> RunningWorker:
        with one_at_a_time:
            return backend.start([specs[number]])[0]

    return start


def nodes_reach(spec: RunSpec) -> NeededAddresses | None:
    """What workers of this run need on other machines; call it after ``worker_starter``.

    Raises ``InvalidInput`` for an address that is no use to machines which the cluster has.
    """
    if spec.backend != "ray":
        return None
    from forebay.workers.backends.ray_cluster import has_other_machines

    return NeededAddresses(spec.payload, has_others=has_other_machines())


def _backend(spec: RunSpec) -> WorkerBackend:
    if spec.backend == "processes":
        from forebay.workers.backends.processes import ProcessesBackend

        return ProcessesBackend(spec.worker_silence_s)
    if spec.backend == "ray":
        return _ray_backend(spec)
    from forebay.workers.backends.by_name import make_backend

    return make_backend(spec.backend)


def _ray_backend(spec: RunSpec) -> WorkerBackend:
    # Every line of a worker is in the run's log, and without colours. Ray reads these when it is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    from forebay.workers.backends.ray import RayBackend

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        return RayBackend(spec.ray_address, spec.ray_namespace, worker_silence_s=spec.worker_silence_s)
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray sets one that knows nothing of stopped runs
