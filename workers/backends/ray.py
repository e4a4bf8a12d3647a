"""Workers on a Ray cluster: an actor each, all workers of a node of the pool in one placement group."""

from collections.abc import Sequence
from typing import Any

from forebay.workers.backends.abc import NodeRoom
from forebay.workers.backends.hand_over import HandOver
from forebay.workers.backends.ray_cluster import connect
from forebay.workers.backends.ray_member import actor_class
from forebay.workers.backends.ray_places import RayPlace, RayPlaces, free_rooms
from forebay.workers.backends.ray_worker import RayWorker
from forebay.workers.backends.watch import WorkerWatch, beat_s
from forebay.workers.backends.wire import spec_frames
from forebay.workers.members.worker_spec import WorkerSpec

MOST_CALLS = 100_000
"""In flight at one actor. Ray's own default is 1000, beyond which calls, those for vital signs too, would wait."""


class RayBackend:
    """Starts workers on a Ray cluster; needs the extra ``ray``."""

    name = "ray"

    def __init__(
        self,
        ray_address: str | None = None,
        ray_namespace: str | None = None,
        *,
        worker_silence_s: float = 10.0,
        placement_s: float = 30.0,
    ) -> None:
        """Joins the cluster at ``ray_address``, or at ``RAY_ADDRESS``; without both, starts one for this process.

        ``ray_namespace`` is Ray's namespace of the actors. A worker that is silent for ``worker_silence_s`` is taken
        for dead; one for which there is no place within ``placement_s`` does not start.
        """
        connect(ray_address, ray_namespace)
        self._actor_class = _remote_class()
        self._silence_s, self._placement_s = worker_silence_s, placement_s
        self._watch = WorkerWatch(beat_s(worker_silence_s))
        self._places = RayPlaces()
        self._answers = HandOver("ray answers")
        self._masters: dict[int, Any] = {}
        """Where each group meets, on the node of its rank 0; its workers have the same ``classes``."""

    def start(self, specs: Sequence[WorkerSpec]) -> Sequence[RayWorker]:
        """Start these, and return while they come up. Raises ``PlacementFailed`` if there can be no place for them.

        One for which there is no place now fails to start with ``PlacementFailed`` after ``placement_s``.
        """
        frames = spec_frames(specs, out_of_band=False)
        places = self._places.take(specs)
        workers = []
        for spec, place, own in zip(specs, places, frames, strict=True):
            actor = self._make_actor(spec, place)
            worker = self._worker(spec, actor, place)
            if spec.rank == 0 and spec.master is not None:
                self._masters[id(spec.classes)] = actor.master.remote()
            worker.begin(own, self._masters.get(id(spec.classes)))
            workers.append(worker)
        return workers

    def free(self) -> Sequence[NodeRoom] | None:
        """What is left on each node."""
        return free_rooms()

    def _worker(self, spec: WorkerSpec, actor: Any, place: RayPlace) -> RayWorker:
        return RayWorker(
            spec,
            actor,
            place,
            self._places,
            self._watch,
            self._answers,
            silence_s=self._silence_s,
            placement_s=self._placement_s,
        )

    def _make_actor(self, spec: WorkerSpec, place: RayPlace) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            "num_cpus": dict(place.needs).get("CPU", 0.0),
            "resources": dict(spec.resources),
            "max_concurrency": MOST_CALLS,
            "max_restarts": 0,  # whoever has the group decides about that
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.bundle),
        }
        if spec.env:
            options["runtime_env"] = {"env_vars": dict(spec.env)}
        return self._actor_class.options(**options).remote()


def _remote_class() -> Any:
    import ray

    return ray.remote(actor_class())
