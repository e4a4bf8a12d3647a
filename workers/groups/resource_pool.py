"""Which processes a worker group may start, node by node, which role has them, and whether there is room for all."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import NodeRoom, WorkerBackend
from forebay.workers.backends.by_name import make_backend
from forebay.workers.members.worker_errors import PlacementFailed

_Process = tuple[object, int]
"""A place for one: its node, which parts of a pool share with the whole, and its number there."""


class ResourcePool:
    """So many processes on each node, with what each of them needs there.

    ``cpus`` and ``resources`` (custom ones, by name) are for backends that count them, as Ray does. Pools are equal
    only to themselves: they may be keys.
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
        """A plain list of counts is a pool too."""
        return pool if isinstance(pool, ResourcePool) else cls(pool)

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return len(self._processes)

    @property
    def process_on_nodes(self) -> list[int]:
        """How many on each node."""
        return list(Counter(node for node, _ in self._processes).values())

    def split(self, sizes: int | Sequence[int]) -> list["ResourcePool"]:
        """Pools over the same nodes, in order: all of one size, or of the given ones, which add up to the whole."""
        if isinstance(sizes, int):
            if sizes < 1 or self.world_size % sizes:
                raise InvalidInput(
                    f"{self.world_size} processes cannot be split into parts of {sizes}",
                    field="sizes",
                    hint="a divisor, or a list of sizes",
                )
            sizes = [sizes] * (self.world_size // sizes)
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes) or sum(sizes) != self.world_size:
            raise InvalidInput(
                f"{list(sizes)} does not add up to {self.world_size} processes",
                field="sizes",
                hint="counts from 1 on, whose sum is the pool's world_size",
            )
        rest = iter(self._processes)
        return [self._part([next(rest) for _ in range(size)]) for size in sizes]

    def merged(self, other: "ResourcePool") -> "ResourcePool":
        """One pool of the processes of both. Parts of one pool are on common nodes again."""
        if (self.cpus, self.resources) != (other.cpus, other.resources):
            raise InvalidInput(
                f"processes with {_said(self)} and {_said(other)} are no pool together",
                field="other",
                hint="one pool has one kind of process",
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
    """Pools by name, and for each role the name of its pool. Roles with one pool share it.

    With a ``backend``, what cannot be placed there is refused at once: ``PlacementFailed``.
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
                    f"role {role!r} wants the pool {name!r}; there are {_listed(self.pools)}",
                    field="mapping",
                    hint="each role has the name of a pool of resource_pool_spec",
                )
        if backend is not None:
            self.check_room(make_backend(backend).free())

    def get_resource_pool(self, role: Any) -> ResourcePool:
        """The pool of a role."""
        if role not in self.mapping:
            raise InvalidInput(
                f"there is no role {role!r}; there are {_listed(self.mapping)}",
                field="role",
                hint="mapping gives each role the name of its pool",
            )
        return self.pools[self.mapping[role]]

    def check_room(self, free: Sequence[NodeRoom] | None) -> None:
        """Raise ``PlacementFailed``, with role, wanted and free, unless all pools fit in there together.

        None stands for a backend that counts nothing, where everything fits.
        """
        if free is None:
            return
        left = [Counter(_room(node)) for node in free]
        wanted = [(count, name) for name, pool in self.pools.items() for count in pool.process_on_nodes]
        # The most demanding ones first: they fit in the fewest places.
        for count, name in sorted(wanted, key=lambda each: -each[0] * self.pools[each[1]].cpus):
            needs = _needs(self.pools[name], count)
            fitting = [room for room in left if all(room[key] >= amount for key, amount in needs.items())]
            if not fitting:
                raise self._failure(name, count, free)
            max(fitting, key=lambda room: room["CPU"]).subtract(needs)

    def _failure(self, name: str, count: int, free: Sequence[NodeRoom]) -> PlacementFailed:
        roles = [str(role) for role, pool in self.mapping.items() if pool == name]
        who = f"role {', '.join(map(repr, roles))}" if roles else "nobody yet"
        return PlacementFailed(
            f"there is no place for {who} (pool {name!r}): wanted {count} processes with"
            f" {_amounts(_needs(self.pools[name], count))} together on one node;"
            f" free: {'; '.join(f'{node.node} {_amounts(_room(node))}' for node in free) or 'no node'}",
            hint="fewer processes on a node, or smaller pools; all pools count together",
        )


def _processes(process_on_nodes: Sequence[int]) -> Iterator[_Process]:
    counts = list(process_on_nodes) if isinstance(process_on_nodes, Sequence) else []
    if not counts or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise InvalidInput(
            f"process_on_nodes is {process_on_nodes!r}",
            field="process_on_nodes",
            hint="a list with a count from 1 on for each node, as [2, 4]",
        )
    for count in counts:
        node = object()
        yield from ((node, number) for number in range(count))


def _amount(amount: float, field: str) -> float:
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
        raise InvalidInput(f"{field} is {amount!r}", field=field, hint="a number from 0 on, for each process")
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
