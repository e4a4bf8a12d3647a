"""How worker groups come up, what they are made of, and how they end, on every backend."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.groups import (
    ClassWithInitArgs,
    ResourcePool,
    ResourcePoolManager,
    WorkerError,
    WorkerFailed,
    WorkerGroup,
    WorkerLost,
    create_colocated_worker_cls,
)
from tests.kit import poll_until
from tests.worker_groups_kit import Judge, Member, Picky
from tests.worker_kit import Unreadable

WAIT_S = 60.0
MakeGroup = Callable[..., WorkerGroup]


# -- what a group is made of


def test_every_constructor_that_raised_is_named(make_group: MakeGroup) -> None:
    with pytest.raises(WorkerFailed) as e:
        make_group(3, ClassWithInitArgs(Picky, 0, 2))
    assert sorted(e.value.traces) == [0, 2]
    assert "no weights on 2" in e.value.traces[2]


def test_what_cannot_be_read_on_the_worker_is_named(make_group: MakeGroup, backend: str) -> None:
    if backend == "inline":
        pytest.skip("nothing is pickled in one process")
    with pytest.raises(InvalidInput, match="the class of the worker cannot be unpickled in its process: ValueError"):
        make_group(1, ClassWithInitArgs(Member, Unreadable()))
    group = make_group(1)
    with pytest.raises(InvalidInput, match="the arguments of echo cannot be unpickled on the worker: ValueError"):
        group.echo(Unreadable())
    assert group.echo(1) == [1]


def test_a_keyboard_interrupt_of_a_method_s_own_fails_its_call_alone(make_group: MakeGroup, backend: str) -> None:
    if backend == "inline":
        pytest.skip("in one process it is the caller's")
    group = make_group(1)
    with pytest.raises(WorkerFailed, match="KeyboardInterrupt"):
        group.execute_func_rank_zero(lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert group.execute_all("foo", 1).get(WAIT_S) == [1]


def test_variables_of_env_are_there_and_those_of_the_system_refused_by_name(make_group: MakeGroup) -> None:
    group = make_group(2, env={"FOREBAY_T_WORKERS": "yes"})
    assert group.variable("FOREBAY_T_WORKERS") == ["yes", "yes"]
    group.close()
    assert "FOREBAY_T_WORKERS" not in os.environ
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS"):
        with pytest.raises(InvalidInput, match=f"{name} is a variable of the system") as e:
            make_group(env={name: "1"})
        assert e.value.field == f"env.{name}"


def test_a_pool_is_split_and_split_again_over_uneven_nodes(make_group: MakeGroup) -> None:
    whole = ResourcePool([2, 4], cpus=0.1)
    halves = whole.split(3)
    assert [half.process_on_nodes for half in halves] == [[2, 1], [3]]
    first, second = halves[0].split([1, 2])
    assert (first.process_on_nodes, second.process_on_nodes) == ([1], [1, 1])
    group = make_group(halves[0], ClassWithInitArgs(Member, 1))
    places = [(each["rank"], each["local_rank"], each["local_world_size"]) for each in group.place()]
    assert places == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    again = make_group(second, ClassWithInitArgs(Member, 1))
    assert [(each["local_rank"], each["local_world_size"]) for each in again.place()] == [(0, 1), (0, 1)]
    assert again.foo(1) == [2, 2]


def test_a_manager_says_which_role_has_which_pool(make_group: MakeGroup) -> None:
    pools = {"small": ResourcePool([1], cpus=0.1), "large": [64]}
    manager = ResourcePoolManager(pools, {"actor": "small", "judge": "small", "critic": "large"})
    by_pool = {manager.get_resource_pool("actor"): ClassWithInitArgs(Member, 1)}
    ((pool, member),) = by_pool.items()
    assert pool is manager.get_resource_pool("judge")
    assert make_group(pool, member).foo(1) == [2]


# -- several classes in one process


@pytest.fixture(scope="module")
def colocated(backend: str) -> Iterator[WorkerGroup]:
    both = create_colocated_worker_cls({"actor": ClassWithInitArgs(Member, 10), "judge": ClassWithInitArgs(Judge, 100)})
    with WorkerGroup(ResourcePool([2], cpus=0.1), both, backend=backend) as group:
        yield group


def test_colocated_classes_share_a_process_and_see_each_other(colocated: WorkerGroup) -> None:
    assert colocated.actor_foo(1) == [11, 11]
    spawned = colocated.spawn(["actor", "judge"])
    assert spawned["actor"].foo(1) == [11, 11]
    assert spawned["judge"].foo(1) == [111, 111]
    pids = [place["pid"] for place in spawned["actor"].place()]
    assert spawned["judge"].neighbours() == [(pid, ["actor"]) for pid in pids]
    with pytest.raises(AttributeError, match="@register"):
        spawned["judge"].add([1])
    with pytest.raises(InvalidInput, match="no role 'critic'; there are actor, judge"):
        colocated.spawn(["critic"])


# -- ending


def test_a_closed_group_has_done_what_it_was_sent_in_order(make_group: MakeGroup) -> None:
    group = make_group(2)
    calls = [group.sleep_in_turn(str(number)) for number in range(4)]
    nap = group.nap(0.2)
    group.close()
    assert nap.get(0) == ["napped"] * 2
    assert [call.get(0)[0][: number + 1] for number, call in enumerate(calls)] == [
        [str(each) for each in range(number + 1)] for number in range(4)
    ]
    with pytest.raises(WorkerError, match="foo was not called: the group is closed"):
        group.foo(1)
    group.close()


def test_a_group_closed_at_once_leaves_nobody_waiting(make_group: MakeGroup) -> None:
    group = make_group(2)

    def script() -> None:
        with group:
            calls.append(group.forever())
            raise RuntimeError("of the script")

    calls: list[Any] = []
    with pytest.raises(RuntimeError, match="of the script"):
        script()
    with pytest.raises((WorkerError, CancelledError)):
        calls[0].get(WAIT_S)


def test_a_group_that_is_being_closed_does_not_wait_for_what_is_cancelled_meanwhile(make_group: MakeGroup) -> None:
    group = make_group(2)
    call = group.forever()
    closing = threading.Thread(target=group.close, args=(600.0,))
    closing.start()
    assert poll_until(lambda: group._workers.is_closed)
    assert call.cancel()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_lost_worker_is_noticed_and_started_anew(make_group: MakeGroup) -> None:
    group, lost = make_group(2), list[tuple[int, str]]()
    group.on_lost(lambda rank, reason: lost.append((rank, reason)))
    call = group.execute_rank(1, "forever")
    assert poll_until(lambda: group.seen()[1] == ["begun"])
    group._workers._workers[1].kill()
    with pytest.raises(WorkerLost, match="worker 1 is lost: it was killed"):
        call.get(WAIT_S)
    assert poll_until(lambda: [rank for rank, _ in lost] == [1])
    assert list(group.lost) == [1]
    with pytest.raises(WorkerLost, match="worker 1 is lost"):
        group.foo(1)
    assert group.square(range(6)).get(WAIT_S) == [n * n for n in range(6)]  # the other one is there
    group.replace(1).result(WAIT_S)
    assert group.foo(1) == [1, 1]
    assert group.seen() == [["begun"], []] or group.seen() == [[], []]
    assert group.lost == {}


def test_a_call_with_retries_goes_on_at_a_worker_that_is_started_anew(
    make_group: MakeGroup, backend: str, tmp_path: Path
) -> None:
    if backend == "inline":
        pytest.skip("os._exit would end this process")
    group = make_group(2)
    assert group.exit_once(str(tmp_path / "once")) == "here again"
    # Of a map, another one takes the item; the one that was lost is back all the same.
    assert group.square_or_exit(range(8), str(tmp_path / "again")).get(WAIT_S) == [n * n for n in range(8)]
    assert poll_until(lambda: not group.lost)
    assert group.foo(1) == [1, 1]
