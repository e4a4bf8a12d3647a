"""Workers on a Ray cluster: an actor each, all workers of a node of the pool in one placement group."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from forebay.core.errors import InvalidInput, NotFound
from forebay.workers.backends.abc import NodeRoom, RunningWorker
from forebay.workers.backends.hand_over import HandOver
from forebay.workers.backends.ray_cluster import connect
from forebay.workers.backends.ray_member import actor_class
from forebay.workers.backends.ray_places import RayPlace, RayPlaces, free_rooms
from forebay.workers.backends.ray_worker import GoneWorker, RayWorker
from forebay.workers.backends.watch import WorkerWatch, beat_s
from forebay.workers.backends.wire import from_frames, spec_frames
from forebay.workers.members.worker_spec import WorkerSpec

MOST_CALLS = 100_000
"""In flight at one actor. Ray's own default is 1000, beyond which calls, those for vital signs too, would wait."""
FINDING_S = 30.0


class RayBackend:
    """Starts workers on a Ray cluster; needs the extra ``ray``."""

    name = "ray"
    can_detach = True

    def __init__(
        self,
        ray_address: str | None = None,
        ray_namespace: str | None = None,
        *,
        worker_silence_s: float = 10.0,
        placement_s: float = 30.0,
    ) -> None:
        """Joins the cluster at ``ray_address``, or at ``RAY_ADDRESS``; without both, starts one for this process.

        ``ray_namespace`` is where detached groups have their names. A worker of which nothing is heard for
        ``worker_silence_s`` is taken for dead; one for which there is no place within ``placement_s`` does not start.
        """
        self._namespace = connect(ray_address, ray_namespace)
        self._actor_class = _remote_class()
        self._silence_s, self._placement_s = worker_silence_s, placement_s
        self._watch = WorkerWatch(beat_s(worker_silence_s))
        self._places = RayPlaces()
        self._answers = HandOver("ray answers")
        self._masters: dict[int, Any] = {}
        """Where each group meets, on the node of its rank 0; its workers have the same ``classes``."""

    def start(self, specs: Sequence[WorkerSpec], *, name: str = "", detached: bool = False) -> Sequence[RayWorker]:
        """Start these, and return while they come up. Raises ``PlacementFailed`` if there can be no place for them.

        One for which there is no place now fails to start with ``PlacementFailed`` after ``placement_s``.
        """
        if detached:
            self._check_name(name, specs)
        frames = spec_frames(specs, out_of_band=False)
        places = self._places.take(specs, name=_full_name(name) if detached else "", detached=detached)
        workers = []
        for spec, place, own in zip(specs, places, frames, strict=True):
            actor = self._make_actor(spec, place, _actor_name(name, spec.rank) if detached else None)
            worker = self._worker(spec, actor, place)
            if spec.rank == 0 and spec.master is not None:
                self._masters[id(spec.classes)] = actor.master.remote()
            worker.begin(own, self._masters.get(id(spec.classes)))
            workers.append(worker)
        return workers

    def find(self, name: str) -> Sequence[RunningWorker]:
        """Those of the detached group of that name, by rank; what has died of it is lost. Raises ``NotFound``."""
        import ray

        prefix = _actor_name(name, "")
        names = [
            each for each in self._actor_names() if each.startswith(prefix) and each.removeprefix(prefix).isdecimal()
        ]
        if not names:
            raise NotFound(
                f"there is no detached group {name!r} in the namespace {self._namespace!r} of the Ray cluster",
                hint="it was closed, or was started in another ray_namespace",
            )
        actors = [ray.get_actor(each, self._namespace) for each in names]
        described = ray.get([actor.describe.remote() for actor in actors], timeout=FINDING_S)
        workers: dict[int, RunningWorker] = {}
        for actor, (frames, group) in zip(actors, described, strict=True):
            spec = cast("WorkerSpec", from_frames(frames))
            place = RayPlace(group, spec.local_rank, spec.node_number, ())
            self._places.adopt(place)
            worker = self._worker(spec, actor, place)
            worker.join()
            workers[spec.rank] = worker
        return [workers.get(rank) or GoneWorker(rank) for rank in range(spec.world_size)]

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

    def _make_actor(self, spec: WorkerSpec, place: RayPlace, name: str | None) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {
            "num_cpus": dict(place.needs).get("CPU", 0.0),
            "resources": dict(spec.resources),
            "max_concurrency": MOST_CALLS,
            "max_restarts": 0,  # whoever has the group decides about that
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.bundle),
        }
        if name is not None:
            options |= {"name": name, "namespace": self._namespace, "lifetime": "detached"}
        if spec.env:
            options["runtime_env"] = {"env_vars": dict(spec.env)}
        return self._actor_class.options(**options).remote()

    def _check_name(self, name: str, specs: Sequence[WorkerSpec]) -> None:
        if not name:
            raise InvalidInput("a detached group needs a name", field="name", hint="it is found by that")
        taken = set(self._actor_names()) & {_actor_name(name, spec.rank) for spec in specs}
        if taken:
            raise InvalidInput(
                f"there is a detached group {name!r} in the namespace {self._namespace!r} already",
                field="name",
                hint="WorkerGroup.from_detached finds it; close it, or take another name",
            )

    def _actor_names(self) -> list[str]:
        from ray.util import list_named_actors

        listed: list[Mapping[str, str]] = list_named_actors(all_namespaces=True)
        return [each["name"] for each in listed if each["namespace"] == self._namespace]


def _remote_class() -> Any:
    import ray

    return ray.remote(actor_class())


def _full_name(name: str) -> str:
    return f"forebay:{name}"


def _actor_name(name: str, rank: int | str) -> str:
    return f"{_full_name(name)}:{rank}"
