"""The lead of a run with workers: starts them, one at a time, and connects its jobs to them."""

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
    """The ``RolloutPlaces`` of a run: ``num_workers`` workers, which ``start`` starts with the first job.

    They live as long as ``run_rollout``: each worker runs its own, in step with the lead's. ``reach`` has the addresses
    that workers must reach if they may be on other machines.
    """

    def __init__(self, start: StartWorker, num_workers: int, reach: NeededAddresses | None = None) -> None:
        self._workers = WorkerSupervisor(start, num_workers)
        self._reach = reach
        self._num_ended = 0

    async def need(self, field: str, url: Callable[[], Awaitable[str]]) -> None:
        """Require workers to reach the address of ``field``. Implements ``RolloutPlaces``, like all methods below."""
        if self._reach is not None:
            self._reach.need(field, await url())

    @asynccontextmanager
    async def opened(self, around: JobContext) -> AsyncIterator[JobPlaces]:
        """Connect a job to its workers while the context is open."""
        addresses = self._reach.addresses if self._reach is not None else []
        job = RemoteJob(around, self._workers, self._num_ended, addresses)
        self._workers.attach(job)
        try:
            yield job.places
        finally:
            await self._workers.detach()
            await job.close()

    def end_job(self, totals: Totals | None) -> None:
        """End this job in the workers. Workers started later skip it."""
        self._num_ended += 1
        self._workers.end_job(None if totals is None else asdict(totals))

    def close(self, drain_s: float) -> None:
        """End the workers once their ``run_rollout`` has returned, or after ``drain_s``."""
        self._workers.close(drain_s)


def worker_starter(spec: RunSpec) -> StartWorker:
    """A function that (re)starts the worker with a given number, from the run's ``workers`` and ``backend``.

    Raises the backend's error if it cannot be used at all.
    """
    backend = _backend(spec)
    code = pack_code(spec) if backend.name == "ray" else b""
    classes = {"": ClassWithInitArgs(RolloutWorker, asdict(replace(spec, workers=[])), code)}
    specs = worker_specs(spec.workers, classes)
    one_at_a_time = threading.Lock()
    """On a cluster, a node's first worker reserves room for all of them; two concurrent starts would both do so."""

    def start(number: int) -> RunningWorker:
        with one_at_a_time:
            return backend.start([specs[number]])[0]

    return start


def nodes_reach(spec: RunSpec) -> NeededAddresses | None:
    """Addresses that workers of this run must reach from other machines. Call it after ``worker_starter``.

    Raises ``InvalidInput`` for an address that other machines of the cluster cannot reach.
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
    # The run's log gets every line of a worker, without colours. Ray reads these variables on import.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    from forebay.workers.backends.ray import RayBackend

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        return RayBackend(spec.ray_address, spec.ray_namespace, worker_silence_s=spec.worker_silence_s)
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray installs a handler that does not stop runs
