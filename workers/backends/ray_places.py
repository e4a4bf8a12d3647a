"""Places for workers on a Ray cluster: one placement group for the workers of each node of a pool."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forebay.workers.backends.abc import NodeRoom, WorkerSpec
from forebay.workers.members.worker_errors import PlacementFailed

_LEAST_CPUS = 0.0001
"""Ray knows no smaller part, and no place of nothing."""
_NOT_RESOURCES = ("node:", "memory", "object_store_memory", "accelerator_type:")


@dataclass(frozen=True)
class RayPlace:
    """The place of one worker: a bundle of a placement group."""

    group: Any
    bundle: int
    node_number: int
    needs: tuple[tuple[str, float], ...]
    classes: Any = field(default=None, compare=False)
    """Of its worker: the same object for all of a group, and so what a group is known by."""

    def suits(self, spec: WorkerSpec) -> bool:
        """Whether it was meant for a worker like this."""
        return (self.node_number, self.needs) == (spec.node_number, _key(spec)) and self.classes is spec.classes

    def is_there(self) -> bool:
        """Whether the cluster has it for us already."""
        return bool(self.group.wait(0))


class RayPlaces:
    """The placement groups of one backend. A worker that is started anew gets the place that a lost one had.

    Workers may be started one by one: the first of a node takes the places of all of them, since they share a machine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[Any] = Counter()
        self._spare: list[RayPlace] = []

    def take(self, specs: Sequence[WorkerSpec]) -> list[RayPlace]:
        """A place for each; the cluster may have to make room for it first.

        Raises ``PlacementFailed`` if even an empty cluster had no room.
        """
        spare = self._take_spare(specs)
        if spare is not None:
            return spare
        nodes = _by_node(specs)
        _check_room(nodes)
        chosen: list[RayPlace] = []
        for node_number, own in nodes.items():
            group = _placement_group(_bundles(own))
            first = own[0]
            places = [
                RayPlace(group, bundle, node_number, _key(first), first.classes) for bundle in range(len(_bundles(own)))
            ]
            with self._lock:
                self._taken[group.id] += len(own)
                self._spare += [place for place in places if place.bundle not in {spec.local_rank for spec in own}]
            chosen += [places[spec.local_rank] for spec in own]
        return chosen

    def give_back(self, place: RayPlace, *, is_lost: bool) -> None:
        """Its worker is gone; that of a lost one is kept for the next, as long as the group has others."""
        with self._lock:
            self._taken[place.group.id] -= 1
            if self._taken[place.group.id] > 0:
                if is_lost:
                    self._spare.append(place)
                return
            del self._taken[place.group.id]
            self._spare = [spare for spare in self._spare if spare.group.id != place.group.id]
        from ray.util import remove_placement_group

        with suppress(Exception):  # the cluster, or our connection to it, is gone, and the place with it
            remove_placement_group(place.group)

    def _take_spare(self, specs: Sequence[WorkerSpec]) -> list[RayPlace] | None:
        with self._lock:
            left, chosen = list(self._spare), []
            for spec in specs:
                place = next((place for place in left if place.suits(spec)), None)
                if place is None:
                    return None
                left.remove(place)
                chosen.append(place)
            self._spare = left
            self._taken.update(place.group.id for place in chosen)
        return chosen


def needs_of(spec: WorkerSpec) -> dict[str, float]:
    """What one worker takes of its node, in Ray's words."""
    return {"CPU": max(spec.cpus, _LEAST_CPUS), **spec.resources}


def free_rooms() -> list[NodeRoom]:
    """What placement groups leave of each node that is alive; of a single node, what Ray says is free."""
    import ray
    from ray.util import placement_group_table

    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    left = {node_id: Counter(_resources(node["Resources"])) for node_id, node in nodes.items()}
    if len(left) == 1:
        left = {node_id: Counter(_resources(ray.available_resources())) for node_id in left}
    else:
        for group in placement_group_table().values():
            for bundle, node_id in group["bundles_to_node_id"].items():
                if node_id in left and group["state"] == "CREATED":
                    left[node_id].subtract(group["bundles"][bundle])
    return [_room(nodes[node_id]["NodeManagerAddress"], each) for node_id, each in left.items()]


def placement_failure(
    bundles: Sequence[Mapping[str, float]], why: str, where: str = "on one machine"
) -> PlacementFailed:
    """Names what these workers want, and what is free."""
    wanted = _sum(bundles)
    free = "; ".join(f"{room.node}: {_said({'CPU': room.cpus, **room.resources})}" for room in free_rooms())
    return PlacementFailed(
        f"{why}: {len(bundles)} {where} want {_said(wanted)}; free is {free or 'nothing: no node is alive'}",
        hint="fewer workers, or workers that want less; or more, or larger, nodes",
    )


def _by_node(specs: Sequence[WorkerSpec]) -> dict[int, list[WorkerSpec]]:
    nodes: dict[int, list[WorkerSpec]] = {}
    for spec in specs:
        nodes.setdefault(spec.node_number, []).append(spec)
    return nodes


def _bundles(own: Sequence[WorkerSpec]) -> list[dict[str, float]]:
    """Of all workers of a node, also those that are started later: they want what the first one wants."""
    return [needs_of(own[0])] * own[0].local_world_size


def _check_room(nodes: Mapping[int, Sequence[WorkerSpec]]) -> None:
    import ray

    totals = [Counter(_resources(node["Resources"])) for node in ray.nodes() if node["Alive"]]
    everything = Counter[str]()
    for own in nodes.values():
        wanted = _sum(_bundles(own))
        everything += wanted
        if not any(wanted <= total for total in totals):
            raise placement_failure(_bundles(own), "no node of the cluster is large enough")
    if not everything <= sum(totals, Counter[str]()):
        bundles = [bundle for own in nodes.values() for bundle in _bundles(own)]
        raise placement_failure(bundles, "the cluster is not large enough, also when nothing else runs", "together")


def _sum(bundles: Sequence[Mapping[str, float]]) -> "Counter[str]":
    wanted = Counter[str]()
    for bundle in bundles:
        for name, number in bundle.items():
            wanted[name] += number  # type: ignore[assignment]  # of parts, too
    return wanted


def _placement_group(bundles: Sequence[Mapping[str, float]]) -> Any:
    from ray.util.placement_group import placement_group

    return placement_group([dict(bundle) for bundle in bundles], strategy="STRICT_PACK")


def _key(spec: WorkerSpec) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(needs_of(spec).items()))


def _resources(all_of: Mapping[str, float]) -> dict[str, float]:
    # Every placement group is a resource too, named by its id.
    return {name: n for name, n in all_of.items() if not name.startswith(_NOT_RESOURCES) and "_group_" not in name}


def _room(node: str, left: Mapping[str, float]) -> NodeRoom:
    return NodeRoom(node, left.get("CPU", 0.0), {name: number for name, number in left.items() if name != "CPU"})


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in resources.items())
