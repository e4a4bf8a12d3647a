"""The policy ``probe``, decision by decision: probes, ranking, caps, windows."""

from collections import Counter, defaultdict
from typing import Any

import pytest

from forebay.core.scheduling.policy import RolloutKey
from tests.scheduling.policy_kit import URLS
from tests.scheduling.probe_kit import (
    CAP,
    FAST,
    HEAVY,
    LENGTHS,
    NAMES,
    at,
    bench,
    end_all,
    end_probes,
    of,
    probe_engines,
    probed,
)


def test_the_probe_of_each_group_runs_first_on_all_engines_and_nothing_else_before_all_are_there() -> None:
    run = bench()
    assert [choice.rollout for choice in run.fill()] == [(name, 0) for name in NAMES]
    assert sorted(run.per_engine().values()) == [2, 2, 3, 3]
    assert {choice.cap_tokens for choice in run.started} == {None}
    for key in list(run.running)[:-1]:
        run.end(key, LENGTHS[key[0]])
        assert run.fill() == []
    end_probes(run)
    assert len(run.fill()) == 30


def test_the_longest_go_on_at_the_heavy_engines_and_the_others_where_their_probe_ran_with_a_cap() -> None:
    run, rest = probed()
    long, others = of(rest, "g8", "g9"), of(rest, *NAMES[:8])
    assert {(choice.engine, choice.cap_tokens) for choice in long} == {(HEAVY[0], None)}
    assert {choice.cap_tokens for choice in others} == {CAP}
    engines = probe_engines(run)
    moved = [choice for choice in others if engines[choice.rollout.group] in HEAVY]
    assert moved
    assert {choice.engine for choice in others} == set(FAST)
    assert all(choice.engine == engines[choice.rollout.group] for choice in others if choice not in moved)
    # One that has to move takes all of its rollouts to one engine, which then has its prompt in the cache.
    homes = defaultdict(set)
    for choice in moved:
        homes[choice.rollout.group].add(choice.engine)
    assert {len(urls) for urls in homes.values()} == {1}
    assert Counter(choice.rollout.group for choice in rest) == dict.fromkeys(NAMES, 3)


def test_longer_groups_come_before_shorter_ones() -> None:
    _, rest = probed(places=8)
    assert rest[0].rollout.group == "g9"
    of_one_engine = [choice.rollout.group for choice in rest if choice.engine == FAST[0]]
    assert of_one_engine == sorted(of_one_engine, key=LENGTHS.__getitem__, reverse=True)


def test_probes_can_be_ranked_by_their_seconds() -> None:
    run = bench(by="seconds")
    run.fill()
    for key in list(run.running):
        run.end(key, LENGTHS[key[0]], seconds=1_000.0 - LENGTHS[key[0]])
    rest = run.fill()
    assert {choice.rollout.group for choice in rest if choice.cap_tokens is None} == {"g0", "g1"}
    assert {choice.cap_tokens for choice in of(rest, *NAMES[2:])} == {1_500}  # still by tokens: 1.5 times those of g9


@pytest.mark.parametrize(("top", "long"), [(0.2, 2), (0.25, 3), (0.5, 5), (0.01, 0)])
def test_the_share_of_long_groups_is_a_setting(top: float, long: int) -> None:
    _, rest = probed(top=top)
    assert {choice.rollout.group for choice in rest if choice.engine in HEAVY} == set(NAMES[10 - long :])


@pytest.mark.parametrize(
    ("cap", "caps"),
    [
        ("cut", dict.fromkeys(NAMES[:8], 1_200)),
        ("own", {name: LENGTHS[name] * 3 // 2 for name in NAMES[:8]}),
        (512, dict.fromkeys(NAMES[:8], 512)),
        ("none", dict.fromkeys(NAMES[:8])),
    ],
)
def test_what_the_others_may_sample_is_a_setting(cap: Any, caps: dict[str, int | None]) -> None:
    run, rest = probed(cap=cap)
    assert {choice.rollout.group: choice.cap_tokens for choice in of(rest, *NAMES[:8])} == caps
    assert {choice.cap_tokens for choice in of(run.started, "g8", "g9")} == {None}


def test_a_broken_rollout_runs_again_at_a_heavy_engine_before_all_others_and_without_a_cap() -> None:
    run, _ = probed(places=8)
    broken = at(run, FAST)[0]
    run.break_off(broken, CAP)
    assert [choice.rollout for choice in run.fill() if choice.engine in HEAVY] == []  # it has two places, both taken
    run.end(at(run, HEAVY)[0])
    (again,) = [choice for choice in run.fill() if choice.engine in HEAVY]
    assert (again.rollout, again.cap_tokens) == (broken, None)


def test_fast_engines_take_several_times_their_places_once_the_probes_are_there() -> None:
    run = bench(places=8)
    run.fill()
    assert set(run.per_engine().values()) == {2}  # probes: as many as there are places
    run, _ = probed(places=8)
    assert run.per_engine() == {HEAVY[0]: 2} | dict.fromkeys(FAST, 4)
    run, _ = probed(places=16, fast_concurrency=1)
    assert run.per_engine() == dict.fromkeys(URLS, 4)


def test_engines_with_places_of_their_own_take_so_many_times_those() -> None:
    run = bench()
    run.loads.limit(dict(zip(URLS, (3, 1, 2, 3), strict=True)))
    run.fill()
    for _ in range(2):
        end_probes(run)
        run.fill()
    assert run.per_engine() == dict(zip(URLS, (3, 2, 4, 6), strict=True))


@pytest.mark.parametrize(
    ("heavy", "expected"),
    [(0.5, URLS[:2]), (0.01, URLS[:1]), (0.99, URLS[:3]), (["http://engine-2/v1/"], [URLS[2]]), (URLS[1:3], URLS[1:3])],
)
def test_heavy_engines_are_named_or_a_share(heavy: Any, expected: list[str]) -> None:
    _, rest = probed(heavy=heavy)
    assert {choice.engine for choice in of(rest, "g8", "g9")} == set(expected)
    assert {choice.engine for choice in of(rest, *NAMES[:8])} == set(URLS) - set(expected)


# --- windows


def test_the_next_window_comes_once_nothing_of_this_one_is_left_to_start() -> None:
    run = bench([f"g{number}" for number in range(30)], places=16)
    run.fill()
    end_all(run)
    run.fill()
    while len(run.started) < 40:
        assert run.num_to_submit == 20
        run.end(next(iter(run.running)))
        run.fill()
    while len(run.started) == 40:
        run.end(next(iter(run.running)))
        run.fill()
    later = [choice.rollout for choice in run.started[40:]]
    assert {number for _, number in later} == {0}
    assert {group for group, _ in later} <= {f"g{number}" for number in range(10, 20)}
    assert run.num_to_submit == 10


def test_heavy_engines_may_be_behind_by_one_window() -> None:
    run = bench([f"g{number}" for number in range(50)], places=8, heavy=0.25)
    for _ in range(200):  # what is heavy never ends
        run.fill()
        for key in [*at(run, FAST), *(key for key in at(run, HEAVY) if key.number == 0)]:
            run.end(key)
    begun = {choice.rollout.group for choice in run.started}
    left_heavy = {group for group in begun if sum(choice.rollout.group == group for choice in run.started) < 4}
    assert len(begun) == 20
    assert len(left_heavy) <= 4
    while run.running:
        end_all(run)
        run.fill()
    assert Counter(choice.rollout.group for choice in run.started) == dict.fromkeys((f"g{n}" for n in range(50)), 4)


def test_the_last_window_may_be_small() -> None:
    run = bench(["a"])
    assert [choice.rollout for choice in run.fill()] == [("a", 0)]
    run.end(RolloutKey("a", 0), 100)
    assert {(choice.engine in FAST, choice.cap_tokens) for choice in run.fill()} == {(True, 150)}


def test_a_step_changes_nothing() -> None:
    run = bench()
    run.fill()
    run.policy.begin_step(1)
    end_probes(run)
    assert len(run.fill()) == 30
