"""Pools of processes, and whether they fit."""

from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.backends.abc import NodeRoom
from forebay.workers.backends.inline import InlineBackend
from forebay.workers.groups import PlacementFailed, ResourcePool, ResourcePoolManager


def test_a_pool_counts_processes_by_node() -> None:
    pool = ResourcePool([2, 4], cpus=0.5, resources={"disk": 2}, name="lab")
    assert (pool.world_size, pool.process_on_nodes) == (6, [2, 4])
    assert (pool.cpus, pool.resources, pool.name) == (0.5, {"disk": 2.0}, "lab")
    assert repr(pool) == "ResourcePool([2, 4], name='lab')"
    assert ResourcePool.of(pool) is pool
    assert ResourcePool.of([3]).process_on_nodes == [3]


def test_pools_are_keys_and_equal_only_to_themselves() -> None:
    one, other = ResourcePool([2]), ResourcePool([2])
    assert {one: "one", other: "other"} == {one: "one", other: "other"}
    assert len({one, other}) == 2


@pytest.mark.parametrize("process_on_nodes", [[], [0], [2, -1], [True], [1.5], ["2"], 4, "24", None])
def test_counts_are_checked(process_on_nodes: Any) -> None:
    with pytest.raises(InvalidInput) as e:
        ResourcePool(process_on_nodes)
    assert e.value.field == "process_on_nodes"
    assert "[2, 4]" in e.value.hint


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cpus": -1}, "cpus"),
        ({"cpus": float("nan")}, "cpus"),
        ({"cpus": "2"}, "cpus"),
        ({"resources": {"disk": float("inf")}}, "resources.disk"),
        ({"resources": {"disk": True}}, "resources.disk"),
    ],
)
def test_what_a_process_needs_is_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as e:
        ResourcePool([1], **options)
    assert e.value.field == field
    assert e.value.hint


def test_a_pool_is_split_by_size_or_list_and_its_parts_again() -> None:
    pool = ResourcePool([2, 4], cpus=0.5, name="lab")
    assert [part.process_on_nodes for part in pool.split(2)] == [[2], [2], [2]]
    assert [part.process_on_nodes for part in pool.split(3)] == [[2, 1], [3]]
    parts = pool.split([1, 5])
    assert [part.process_on_nodes for part in parts] == [[1], [1, 4]]
    assert [part.process_on_nodes for part in parts[1].split([2, 3])] == [[1, 1], [3]]
    assert {(part.cpus, part.name) for part in parts} == {(0.5, "lab")}
    assert pool.process_on_nodes == [2, 4]


@pytest.mark.parametrize("sizes", [4, 0, -1, [1, 2], [6, 0], [], [7]])
def test_parts_add_up_to_the_whole(sizes: Any) -> None:
    with pytest.raises(InvalidInput) as e:
        ResourcePool([2, 4]).split(sizes)
    assert e.value.field == "sizes"
    assert e.value.hint


def test_parts_are_merged_on_the_nodes_that_they_came_from() -> None:
    pool = ResourcePool([2, 4])
    first, second, third = pool.split(2)
    assert second.merged(third).process_on_nodes == [4]
    assert first.merged(second.merged(third)).process_on_nodes == [2, 4]
    one, rest = pool.split([1, 5])
    assert rest.merged(one).process_on_nodes == [2, 4]
    assert first.merged(ResourcePool([3])).process_on_nodes == [2, 3]


def test_what_is_no_pool_together_is_not_merged() -> None:
    pool = ResourcePool([2, 4])
    with pytest.raises(InvalidInput, match="both pools have the same 2 processes"):
        pool.merged(pool.split(2)[0])
    with pytest.raises(InvalidInput, match=r"with 1 CPUs and 2 CPUs, 1 disk cannot form one pool") as e:
        pool.merged(ResourcePool([1], cpus=2, resources={"disk": 1}))
    assert e.value.field == "other"


def test_a_manager_knows_the_pool_of_each_role() -> None:
    own = ResourcePool([1], name="own")
    manager = ResourcePoolManager({"large": [2, 2], "own": own}, {"actor": "large", "critic": "own", "judge": "own"})
    assert manager.get_resource_pool("actor").process_on_nodes == [2, 2]
    assert manager.get_resource_pool("actor").name == "large"
    assert manager.get_resource_pool("critic") is manager.get_resource_pool("judge") is own
    with pytest.raises(InvalidInput, match="unknown role 'ref'; the roles are 'actor', 'critic', 'judge'"):
        manager.get_resource_pool("ref")


def test_a_role_without_a_pool_is_refused() -> None:
    with pytest.raises(InvalidInput, match="role 'actor' names the unknown pool 'large'; the pools are 'small'") as e:
        ResourcePoolManager({"small": [1]}, {"actor": "large"})
    assert e.value.field == "mapping"


FREE = [NodeRoom("a", 4.0), NodeRoom("b", 2.0, {"disk": 1.0})]


def test_what_fits_is_placed() -> None:
    ResourcePoolManager({"x": [2, 2], "y": [2]}, {"actor": "x"}).check_room(FREE)
    ResourcePoolManager({"x": [1000]}, {"actor": "x"}).check_room(None)
    ResourcePoolManager({"x": [1000]}, {"actor": "x"}, backend="inline")


class Full(InlineBackend):
    """Counts what it has."""

    def free(self) -> list[NodeRoom]:
        return FREE


def test_what_cannot_be_placed_is_told_with_role_wanted_and_free() -> None:
    with pytest.raises(PlacementFailed) as e:
        ResourcePoolManager({"x": [3], "y": [3]}, {"actor": "x", "critic": "y"}, backend=Full())
    assert e.value.message == (
        "there is no room for role 'critic' (pool 'y'): it needs 3 processes with 3 CPU together on one node;"
        " free: a 4 CPU; b 2 CPU, 1 disk"
    )
    pool = ResourcePool([2], cpus=0, resources={"disk": 1})
    with pytest.raises(PlacementFailed, match=r"role 'actor', 'judge' .* it needs 2 processes with 0 CPU, 2 disk"):
        ResourcePoolManager({"x": pool}, {"actor": "x", "judge": "x"}).check_room(FREE)
    with pytest.raises(PlacementFailed, match="free: no node"):
        ResourcePoolManager({"x": [1]}, {"actor": "x"}).check_room([])
