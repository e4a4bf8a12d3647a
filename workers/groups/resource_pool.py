"""Resource pools: the processes that a worker group may start on each node, their roles, and checks for room."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import NodeRoom, WorkerBackend
from forebay.workers.backends.by_name import make_backend
from forebay.workers.members.worker_errors import PlacementFailed

_Process = tuple[object, int]
"""A node, which parts of a pool share with the whole, and the number of the process there."""


class ResourcePool:
    """Number of processes on each node, and the resources that each process needs.

    ``cpus`` and ``resources`` (custom ones, by name) matter for backends that count them, such as Ray. Pools compare by
    identity, so they can be dict keys.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        *,
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        name: str = "",
    ) -> None:
        self.cpus = _amount(cpus, "cpus")
        self.resources = {key: _amount(amount, f"resources.{key}") for key, amount in (resources or {}).items()}
        self.name = name
        self._processes = tuple(_processes(process_on_nodes))

    @classmethod
    def of(cls, pool: "ResourcePool | Sequence[int]") -> "ResourcePool":
        """Return ``pool``, converted if it is a plain list of counts."""
        return pool if isinstance(pool, ResourcePool) else cls(pool)

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return len(self._processes)

    @property
    def process_on_nodes(self) -> list[int]:
        """Number of processes on each node."""
        return list(Counter(node for node, _ in self._processes).values())

    def split(self, sizes: int | Sequence[int]) -> list["ResourcePool"]:
        """Split into pools over the same nodes, in order. A number is the size of every part; a list must add up."""
        if isinstance(sizes, int):
            if sizes < 1 or self.world_size % sizes:
                raise InvalidInput(
                    f"{self.world_size} processes cannot be split into parts of {sizes}",
                    field="sizes",
                    hint="use a divisor, or a list of sizes",
                )
            sizes = [sizes] * (self.world_size // sizes)
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes) or sum(sizes) != self.world_size:
            raise InvalidInput(
                f"{list(sizes)} does not add up to {self.world_size} processes",
                field="sizes",
                hint="use counts of at least 1 whose sum is the pool's world_size",
            )
        rest = iter(self._processes)
        return [self._part([next(rest) for _ in range(size)]) for size in sizes]

    def merged(self, other: "ResourcePool") -> "ResourcePool":
        """Merge the processes of two pools into one. Parts of one pool are on their common nodes again."""
        if (self.cpus, self.resources) != (other.cpus, other.resources):
            raise InvalidInput(
                f"processes with {_said(self)} and {_said(other)} cannot form one pool",
                field="other",
                hint="all processes of a pool need the same cpus and resources",
            )
        if shared := set(self._processes) & set(other._processes):
            raise InvalidInput(
                f"both pools have the same {len(shared)} processes", field="other", hint="merge different parts"
            )
        processes = self._processes + other._processes
        order = {node: number for number, node in enumerate(dict.fromkeys(node for node, _ in processes))}
        return self._part(sorted(processes, key=lambda each: order[each[0]]))

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        return f"ResourcePool({self.process_on_nodes}{name})"

    def _part(self, processes: Sequence[_Process]) -> "ResourcePool":
        part = ResourcePool([1], cpus=self.cpus, resources=self.resources, name=self.name)
        part._processes = tuple(processes)
        return part


class ResourcePoolManager:
    """Pools by name, and the name of each role's pool. Several roles may share a pool.

    With a ``backend``, pools that do not fit there raise ``PlacementFailed`` at once.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, ResourcePool | Sequence[int]],
        mapping: Mapping[Any, str],
        *,
        backend: str | WorkerBackend | None = None,
    ) -> None:
        self.pools = {
            name: pool if isinstance(pool, ResourcePool) else ResourcePool(pool, name=name)
            for name, pool in resource_pool_spec.items()
        }
        self.mapping = dict(mapping)
        for role, name in self.mapping.items():
            if name not in self.pools:
                raise InvalidInput(
                    f"role {role!r} names the unknown pool {name!r}; the pools are {_listed(self.pools)}",
                    field="mapping",
                    hint="mapping gives each role the name of a pool of resource_pool_spec",
                )
        if backend is not None:
            self.check_room(make_backend(backend).free())

    def get_resource_pool(self, role: Any) -> ResourcePool:
        """The pool of a role."""
        if role not in self.mapping:
            raise InvalidInput(
                f"unknown role {role!r}; the roles are {_listed(self.mapping)}",
                field="role",
                hint="mapping gives each role the name of its pool",
            )
        return self.pools[self.mapping[role]]

    def check_room(self, free: Sequence[NodeRoom] | None) -> None:
        """Raise ``PlacementFailed`` unless all pools together fit into ``free``. It names role, needs and free room.

        None means that the backend does not count resources, so everything fits.
        """
        if free is None:
            return
        left = [Counter(_room(node)) for node in free]
        wanted = [(count, name) for name, pool in self.pools.items() for count in pool.process_on_nodes]
        # The most demanding pools first: they fit on the fewest nodes.
        for count, name in sorted(wanted, key=lambda each: -each[0] * self.pools[each[1]].cpus):
            needs = _needs(self.pools[name], count)
            fitting = [room for room in left if all(room[key] >= amount for key, amount in needs.items())]
            if not fitting:
                raise self._failure(name, count, free)
            max(fitting, key=lambda room: room["CPU"]).subtract(needs)

    def _failure(self, name: str, count: int, free: Sequence[NodeRoom]) -> PlacementFailed:
        roles = [str(role) for role, pool in self.mapping.items() if pool == name]
        who = f"role {', '.join(map(repr, roles))}" if roles else "no role"
        return PlacementFailed(
            f"there is no room for {who} (pool {name!r}): it needs {count} processes with"
            f" {_amounts(_needs(self.pools[name], count))} together on one node;"
            f" free: {'; '.join(f'{node.node} {_amounts(_room(node))}' for node in free) or 'no node'}",
            hint="use fewer processes on a node, or smaller pools; all pools count together",
        )


def _processes(process_on_nodes: Sequence[int]) -> Iterator[_Process]:
    counts = list(process_on_nodes) if isinstance(process_on_nodes, Sequence) else []
    if not counts or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise InvalidInput(
            f"process_on_nodes must be a list of counts (got {process_on_nodes!r})",
            field="process_on_nodes",
            hint="give each node a count of at least 1, as [2, 4]",
        )
    for count in counts:
        node = object()
        yield from ((node, number) for number in range(count))


def _amount(amount: float, field: str) -> float:
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
        raise InvalidInput(f"{field} must be at least 0 (got {amount!r})", field=field, hint="a number per process")
    return float(amount)


def _said(pool: ResourcePool) -> str:
    return ", ".join([f"{pool.cpus:g} CPUs", *(f"{amount:g} {name}" for name, amount in pool.resources.items())])


def _needs(pool: ResourcePool, count: int) -> dict[str, float]:
    each = {"CPU": pool.cpus, **pool.resources}
    return {name: amount * count for name, amount in each.items()}


def _room(node: NodeRoom) -> dict[str, float]:
    return {"CPU": node.cpus, **node.resources}


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _listed(names: Mapping[Any, object]) -> str:
    return ", ".join(map(repr, names)) or "none"
