"""What every policy that comes with Forebay promises, whatever happens to rollouts, groups and engines."""

import random
from typing import Any

import pytest

from forebay.core.scheduling.policy import PastRollout, RolloutKey
from tests.scheduling.policy_kit import URLS, Bench, past, policy_of, run_to_the_end, trouble, waiting

POLICIES = ["pull", "static", "longest-first", "probe"]
HISTORY = [past(number, 100 + 37 * number % 900) for number in range(0, 60, 2)]


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def groups(num: int = 60, size: int = 2, **changes: Any) -> list:
    return [waiting(number, size, num_chars=10 + 13 * number % 70, **changes) for number in range(num)]


HAS_A_SAMPLE = {"taken": (9,)}
"""Nothing is to be found out about such a group before its rollouts are started."""


@pytest.mark.parametrize("seed", range(8))
def test_each_rollout_is_chosen_until_it_has_ended_whatever_happens(name: str, seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench(policy_of(name, window=6, history=HISTORY), groups())
    for _ in range(900):
        trouble(bench, draw)
    bench.loads.may_begin = True
    bench.set_engines(URLS)
    run_to_the_end(bench, lambda _: draw.randint(1, 4_000))
    assert len(set(bench.ended)) == len(bench.ended)


@pytest.mark.parametrize("seed", range(4))
def test_no_group_is_passed_over_more_often_than_the_window_has_groups(name: str, seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench(policy_of(name, window=5, history=HISTORY), groups(80), num_places=6)
    for _ in range(2_000):
        trouble(bench, draw, is_calm=True)
    bench.loads.may_begin = True
    run_to_the_end(bench, lambda _: draw.randint(1, 4_000))
    assert len(bench.begun) == 80
    assert bench.passed_over() <= 5


def test_no_more_groups_are_looked_at_than_the_window_has(name: str) -> None:
    policy = policy_of(name, window=3)
    assert policy.room() == 3
    for group in groups(3):
        policy.submit(group)
    assert policy.room() == 0


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_with_places_of_its_own_gets_no_more_rollouts(name: str, seed: int) -> None:
    draw = random.Random(seed)
    limits = dict(zip(URLS, (2, 5, 9, 16), strict=True))
    bench = Bench(policy_of(name, fast_concurrency=1), groups(size=8))
    bench.loads.limit(limits)
    for _ in range(200):
        bench.fill()
        at_each = bench.per_engine()
        assert all(at_each[url] <= limit for url, limit in limits.items()), at_each
        bench.end(draw.choice(list(bench.running)), draw.randint(1, 4_000))


def test_nothing_begins_while_a_group_waits_for_room_in_the_buffer(name: str) -> None:
    bench = Bench(policy_of(name), groups(4, size=3, **HAS_A_SAMPLE), num_places=100)
    assert bench.next() is not None
    bench.loads.may_begin = False
    assert {choice.rollout.group for choice in bench.fill()} == {bench.begun[0]}
    bench.loads.may_begin = True
    assert len(bench.fill()) == 9


def test_what_begins_afresh_is_started_without_beginning_again(name: str) -> None:
    bench = Bench(policy_of(name), groups(1, **HAS_A_SAMPLE))
    bench.fill()
    bench.loads.may_begin = False
    bench.begin_afresh("group-0")
    assert {choice.rollout for choice in bench.fill()} == {RolloutKey("group-0", 2), RolloutKey("group-0", 3)}


def test_of_a_closed_group_nothing_is_started_any_more(name: str) -> None:
    bench = Bench(policy_of(name), groups(3, size=3), num_places=2)
    begun = {choice.rollout.group for choice in bench.fill()}
    bench.close("group-2")
    for group in begun:
        bench.close(group)
    run_to_the_end(bench, lambda _: 5)
    assert not {key.group for key in bench.ended} & {*begun, "group-2"}


def test_what_is_lost_or_broken_is_chosen_again(name: str) -> None:
    bench = Bench(policy_of(name), groups(1, **HAS_A_SAMPLE))
    lost, broken = (choice.rollout for choice in bench.fill())
    bench.lose(lost)
    bench.break_off(broken)
    assert {choice.rollout for choice in bench.fill()} == {lost, broken}


def test_a_history_without_any_of_the_instances_changes_nothing(name: str) -> None:
    strangers = [PastRollout("stranger", 0, number, 10_000, 1.0) for number in range(8)]
    without, given = (Bench(policy_of(name, history=history), groups(20)) for history in ((), strangers))
    for bench in (without, given):
        run_to_the_end(bench, lambda key: 10 + key.number)
    assert given.chosen == without.chosen
