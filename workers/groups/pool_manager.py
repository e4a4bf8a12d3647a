"""Which role runs on which pool, and whether there is room for all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import NodeRoom, WorkerBackend
from forebay.workers.backends.by_name import make_backend
from forebay.workers.groups.resource_pool import ResourcePool
from forebay.workers.members.worker_errors import PlacementFailed


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


def _needs(pool: ResourcePool, count: int) -> dict[str, float]:
    each = {"CPU": pool.cpus, **pool.resources}
    return {name: amount * count for name, amount in each.items()}


def _room(node: NodeRoom) -> dict[str, float]:
    return {"CPU": node.cpus, **node.resources}


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _listed(names: Mapping[Any, object]) -> str:
    return ", ".join(map(repr, names)) or "none"
