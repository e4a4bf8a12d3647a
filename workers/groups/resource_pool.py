"""Which processes a worker group may start, node by node."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forebay.core.errors import InvalidInput


class _Node:
    """One machine, whichever that will be: pools that were split off keep to the nodes of the whole."""


@dataclass(frozen=True)
class _Process:
    """A place for one, of one pool and of what is split off."""

    node: _Node
    number: int


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
        return list(Counter(each.node for each in self._processes).values())

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
                f"processes with {_needs(self)} and {_needs(other)} are no pool together",
                field="other",
                hint="one pool has one kind of process",
            )
        if shared := set(self._processes) & set(other._processes):
            raise InvalidInput(
                f"both pools have the same {len(shared)} processes", field="other", hint="merge different parts"
            )
        processes = self._processes + other._processes
        order = {node: number for number, node in enumerate(dict.fromkeys(each.node for each in processes))}
        return self._part(sorted(processes, key=lambda each: order[each.node]))

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        return f"ResourcePool({self.process_on_nodes}{name})"

    def _part(self, processes: Sequence[_Process]) -> "ResourcePool":
        part = ResourcePool([1], cpus=self.cpus, resources=self.resources, name=self.name)
        part._processes = tuple(processes)
        return part


def _processes(process_on_nodes: Sequence[int]) -> Iterator[_Process]:
    counts = list(process_on_nodes) if isinstance(process_on_nodes, Sequence) else []
    if not counts or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise InvalidInput(
            f"process_on_nodes is {process_on_nodes!r}",
            field="process_on_nodes",
            hint="a list with a count from 1 on for each node, as [2, 4]",
        )
    for count in counts:
        node = _Node()
        yield from (_Process(node, number) for number in range(count))


def _amount(amount: float, field: str) -> float:
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
        raise InvalidInput(f"{field} is {amount!r}", field=field, hint="a number from 0 on, for each process")
    return float(amount)


def _needs(pool: ResourcePool) -> str:
    return ", ".join([f"{pool.cpus:g} CPUs", *(f"{amount:g} {name}" for name, amount in pool.resources.items())])
