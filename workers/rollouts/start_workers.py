"""How the workers of a run are started, one by one."""

import os
import signal
import threading
from dataclasses import asdict, replace

from forebay.generators.process.spec import RunSpec
from forebay.workers.backends.abc import RunningWorker, WorkerBackend
from forebay.workers.members.worker import ClassWithInitArgs
from forebay.workers.members.worker_spec import worker_specs
from forebay.workers.rollouts.reach import NeededAddresses
from forebay.workers.rollouts.rollout_worker import RolloutWorker
from forebay.workers.rollouts.shipped_code import pack_code
from forebay.workers.rollouts.supervisor import StartWorker


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
