"""Connects this process to a Ray cluster, and reserves room for workers there."""

import logging
import os
import secrets
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from forebay.core.errors import InvalidInput, MissingExtra
from forebay.workers.backends.abc import NodeRoom
from forebay.workers.members.worker_errors import PlacementFailed, WorkerError
from forebay.workers.members.worker_spec import WorkerSpec

NAMESPACE = "forebay"
REACHING_S = 10.0
"""Time limit for reaching the cluster. Ray itself tries for minutes."""
_TOKEN = secrets.token_hex(32)
"""Token of every cluster that this process starts. Ray reads it once; its own would be in a world-readable file."""
_connecting = threading.Lock()
_LEAST_CPUS = 0.0001
"""Ray's smallest CPU share. It accepts no empty bundle."""
_NOT_RESOURCES = ("node:", "memory", "object_store_memory", "accelerator_type:")


def connect(address: str | None, namespace: str | None) -> None:
    """Connect this process to a Ray cluster, unless it already is.

    Joins the cluster at ``address`` or ``RAY_ADDRESS``; without either, starts one with a token for this process.
    Raises ``MissingExtra``, ``InvalidInput``, and ``WorkerError`` if no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    with _connecting:
        if not ray.is_initialized():
            check_address(wanted)
            _initialise(wanted, namespace or NAMESPACE)
        elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
            raise InvalidInput(
                f"this process is already connected to the Ray cluster at {ray.get_runtime_context().gcs_address}",
                field="ray_address",
                hint="a process can join one cluster; omit the address, or call ray.shutdown() first",
            )


def check_address(address: str) -> None:
    """Check the format of an address and connect to it, since Ray itself would try for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise InvalidInput(
            f"{address!r} is not an address of a Ray cluster",
            field="ray_address",
            hint="use HOST:PORT of the head node, as `ray start --head` prints it (port 6379 by default), or 'auto'",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHING_S).close()
    except OSError as error:
        raise WorkerError(
            f"no Ray cluster answers at {address}: {error}",
            hint="start it with ray start --head; Forebay starts no other cluster instead",
        ) from error


def has_other_machines() -> bool:
    """Whether the cluster that this process is connected to has nodes with other addresses than its own."""
    import ray

    own = ray.util.get_node_ip_address()
    return any(node["Alive"] and node["NodeManagerAddress"] != own for node in ray.nodes())


def _initialise(address: str, namespace: str) -> None:
    import ray

    with _own_settings() if address == "local" else nullcontext():
        try:
            ray.init(
                address=address,
                namespace=namespace,
                include_dashboard=False if address == "local" else None,
                logging_level=logging.WARNING,
                log_to_driver=True,  # the controller's log gets the output of workers
            )
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise WorkerError(
                f"the Ray cluster at {address} cannot be joined: {error}",
                hint="set its token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; "
                "a process that was in another cluster keeps that cluster's token",
            ) from error


@contextmanager
def _own_settings() -> Iterator[None]:
    """Set variables for a cluster of this process, so that other users cannot read its files and token.

    Usage reports to Ray are off unless the user enabled them.
    """
    # Ray's own folder, with the output of workers, is world-readable, so it is put into a private one.
    own = {"RAY_TMPDIR": tempfile.mkdtemp(prefix="fbray", dir=os.environ.get("RAY_TMPDIR"))}
    own["RAY_USAGE_STATS_ENABLED"] = os.environ.get("RAY_USAGE_STATS_ENABLED", "0")
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        own["RAY_AUTH_TOKEN"] = _TOKEN
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class RayBundles:
    """The placement groups of one backend: one for each node of a pool, with one bundle per worker.

    Workers may be started one by one: the first of a node reserves room for all of them, since they share a machine.
    A restarted worker uses the bundle of its predecessor, by its local rank.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, int], Any] = {}
        self._num_taken: Counter[tuple[int, int]] = Counter()

    def take(self, specs: Sequence[WorkerSpec]) -> list[Any]:
        """Return the placement group of each worker, which may have to wait for room.

        Raises ``PlacementFailed`` if even an empty cluster would have no room.
        """
        from ray.util.placement_group import placement_group

        with self._lock:
            missing = {_node_of(spec): spec for spec in specs if _node_of(spec) not in self._groups}
            _check_room(list(missing.values()))
            for node, first in missing.items():
                bundles = [needs_of(first)] * first.local_world_size
                self._groups[node] = placement_group(bundles, strategy="STRICT_PACK")
            self._num_taken.update(map(_node_of, specs))
            return [self._groups[_node_of(spec)] for spec in specs]

    def give_back(self, spec: WorkerSpec) -> None:
        """Release a worker's bundle. The last worker of a node removes the placement group."""
        from ray.util import remove_placement_group

        with self._lock:
            self._num_taken[_node_of(spec)] -= 1
            group = self._groups.pop(_node_of(spec)) if not self._num_taken[_node_of(spec)] else None
        if group is not None:
            with suppress(Exception):  # the cluster or the connection is gone, and the group with it
                remove_placement_group(group)


def needs_of(spec: WorkerSpec) -> dict[str, float]:
    """Resources that one worker takes of its node, by Ray's names."""
    return {"CPU": max(spec.cpus, _LEAST_CPUS), **spec.resources}


def free_rooms() -> list[NodeRoom]:
    """Resources of each live node outside placement groups. For a single node, the free resources that Ray reports."""
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


def placement_failure(specs: Sequence[WorkerSpec], why: str, where: str = "on one machine") -> PlacementFailed:
    """An error with the needs of these nodes' workers and the free room. ``specs`` has one spec for each node."""
    free = "; ".join(f"{room.node}: {_said({'CPU': room.cpus, **room.resources})}" for room in free_rooms())
    count = sum(spec.local_world_size for spec in specs)
    return PlacementFailed(
        f"{why}: {count} {where} need {_said(_wanted(specs))}; free: {free or 'nothing, no node is alive'}",
        hint="use fewer workers, workers that need less, or more or larger nodes",
    )


def _check_room(nodes: Sequence[WorkerSpec]) -> None:
    """Raise ``PlacementFailed`` unless an empty cluster would have room for the workers of these nodes."""
    import ray

    totals = [Counter(_resources(node["Resources"])) for node in ray.nodes() if node["Alive"]]
    for spec in nodes:
        if not any(_wanted([spec]) <= total for total in totals):
            raise placement_failure([spec], "no node of the cluster is large enough")
    if not _wanted(nodes) <= sum(totals, Counter[str]()):
        raise placement_failure(nodes, "the cluster is not large enough, even when nothing else runs", "together")


def _wanted(nodes: Sequence[WorkerSpec]) -> "Counter[str]":
    wanted = Counter[str]()
    for spec in nodes:
        for name, number in needs_of(spec).items():
            wanted[name] += number * spec.local_world_size  # type: ignore[assignment]  # may be a fraction
    return wanted


def _node_of(spec: WorkerSpec) -> tuple[int, int]:
    """Key of a group's node. All workers of a group share one ``classes`` object, whose id identifies the group."""
    return id(spec.classes), spec.node_number


def _resources(all_of: Mapping[str, float]) -> dict[str, float]:
    # Ray also lists each placement group as a resource, named by its id.
    return {name: n for name, n in all_of.items() if not name.startswith(_NOT_RESOURCES) and "_group_" not in name}


def _room(node: str, left: Mapping[str, float]) -> NodeRoom:
    return NodeRoom(node, left.get("CPU", 0.0), {name: number for name, number in left.items() if name != "CPU"})


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in resources.items())
