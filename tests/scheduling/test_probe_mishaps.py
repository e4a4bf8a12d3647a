"""The policy ``probe`` where something goes wrong: probes, groups and rooms that are gone."""

from collections import Counter
from typing import Any

import pytest

from forebay.core.scheduling.policy import PastRollout, RolloutEnd, RolloutKey, WaitingGroup
from tests.scheduling.probe_kit import CAP, FAST, HEAVY, LENGTHS, NAMES, bench, end_all, end_probes, group, of, probed


@pytest.mark.parametrize("ending", ["failed", "aborted"])
def test_a_probe_that_came_to_nothing_says_nothing_about_its_group(ending: Any) -> None:
    run = bench()
    run.fill()
    run.end(RolloutKey("g3", 0), 100_000, ending=ending)
    assert run.fill() == []
    end_probes(run)
    rest = run.fill()
    assert {choice.rollout.group for choice in rest if choice.engine in HEAVY} == {"g8", "g9"}
    assert {choice.cap_tokens for choice in of(rest, "g3")} == {CAP}


@pytest.mark.parametrize(("cap", "expected"), [("cut", None), ("own", None), (77, 77)])
def test_where_no_probe_says_anything_nothing_is_cut(cap: Any, expected: int | None) -> None:
    run = bench(["a", "b"], cap=cap)
    run.fill()
    for name in "ab":
        run.end(RolloutKey(name, 0), 10, ending="failed")
    rest = run.fill()
    assert {(choice.engine in FAST, choice.cap_tokens) for choice in rest} == {(True, expected)}
    assert len(rest) == 6


def past(name: str, number: int, tokens: int, **changes: Any) -> PastRollout:
    return PastRollout(name, 0, number, tokens, 1.0, **({"is_of_this_run": True} | changes))


def test_a_group_whose_probe_is_there_is_not_probed_again() -> None:
    groups = [group(name, numbers=(1, 2, 3), num_needed=3, taken=(0,)) for name in NAMES[5:]]
    history = [past(name, number, LENGTHS[name] if number == 0 else 1) for name in NAMES[5:] for number in (2, 0)]
    run = bench([*NAMES[:5], *groups], history=history)
    assert [choice.rollout for choice in run.fill()] == [(name, 0) for name in NAMES[:5]]
    end_probes(run)
    rest = run.fill()
    assert {choice.rollout.group for choice in rest if choice.engine in HEAVY} == {"g8", "g9"}
    assert Counter(choice.rollout.group for choice in rest) == dict.fromkeys(NAMES, 3)
    assert {choice.cap_tokens for choice in of(rest, *NAMES[:8])} == {CAP}


def test_one_of_which_only_the_sample_is_there_is_not_ranked() -> None:
    unknown = group("x", numbers=(1, 2, 3), num_needed=3, taken=(0,))
    other_runs = [
        past("x", 0, 100_000, is_of_this_run=False),
        PastRollout("x", 1, 0, 100_000, 1.0, is_of_this_run=True),
    ]
    _, rest = probed(groups=[*NAMES, unknown], window=11, history=other_runs)
    assert {choice.rollout.group for choice in rest if choice.engine in HEAVY} == {"g8", "g9"}
    assert {(choice.engine in FAST, choice.cap_tokens) for choice in of(rest, "x")} == {(True, CAP)}
    assert len({choice.engine for choice in of(rest, "x")}) == 1


def test_what_was_recorded_is_read_only_where_a_group_has_a_sample() -> None:
    class Unread(tuple[PastRollout, ...]):
        def __iter__(self) -> Any:
            raise AssertionError("it was read")

    run, _ = probed(history=Unread())
    with pytest.raises(AssertionError, match="it was read"):
        run.submit(group("x", numbers=(1, 2), num_needed=2, taken=(0,)))


def test_a_closed_group_is_waited_for_no_longer() -> None:
    run = bench()
    run.fill()
    run.close("g9")
    for key in [key for key in run.running if key != ("g0", 0)]:
        run.end(key, LENGTHS[key[0]])
    assert run.fill() == []
    run.close("g0")
    rest = run.fill()
    assert len(rest) == 24
    assert {choice.rollout.group for choice in rest if choice.engine in HEAVY} == {"g7", "g8"}


def test_of_a_closed_group_nothing_is_started_and_its_places_are_free() -> None:
    run, _ = probed(places=8)
    for name in NAMES[1:]:
        run.close(name)
    run.fill()
    assert {group for group, _ in run.running} == {"g0"}
    end_all(run)
    assert run.fill() == []


def test_a_lost_rollout_is_started_again_as_what_it_was() -> None:
    run = bench()
    run.fill()
    run.lose(RolloutKey("g4", 0))
    assert [(choice.rollout, choice.cap_tokens) for choice in run.fill()] == [(("g4", 0), None)]
    end_probes(run)
    rest = {choice.rollout: choice for choice in run.fill()}
    for key in (RolloutKey("g9", 1), RolloutKey("g2", 1)):
        run.lose(key)
        (again,) = run.fill()
        assert again == rest[key]


def test_while_nothing_may_begin_only_what_has_begun_goes_on() -> None:
    groups = [group("begun", numbers=(1, 2, 3), num_needed=3, taken=(0,), is_open=True), "a", "b"]
    run = bench(groups)
    run.loads.may_begin = False
    assert run.fill() == []  # the window waits for two probes
    run.loads.may_begin = True
    run.fill()
    assert set(run.running) == {("a", 0), ("b", 0)}
    there = [group(name, numbers=(1, 2), num_needed=2, taken=(0, 3)) for name in ("x", "y")]
    run = bench([*there, group("begun", numbers=(1, 2), num_needed=2, taken=(0, 3), is_open=True)])
    run.loads.may_begin = False
    assert {choice.rollout for choice in run.fill()} == {("begun", 1), ("begun", 2)}
    run.loads.may_begin = True
    assert len(run.fill()) == 4


def test_a_full_buffer_lets_groups_whose_probes_are_there_go_on_without_the_rest_of_their_window() -> None:
    run = bench(places=4)
    run.fill()
    for key in list(run.running):
        run.end(key, LENGTHS[key.group])
    waiting_for_room = run.next()
    assert waiting_for_room is not None
    run.loads.may_begin = False
    assert run.fill() == [], "it may be a moment"
    run.loads.is_buffer_full = True
    begun = set(NAMES[:4])
    assert {choice.rollout.group for choice in run.fill()} <= begun
    while keys := [key for key in run.running if key.group in begun]:
        for key in keys:
            run.end(key, 10)
        assert {choice.rollout.group for choice in run.fill()} <= begun
    assert Counter(key.group for key in run.ended) == dict.fromkeys(begun, 4)
    run.loads.may_begin, run.loads.is_buffer_full = True, False
    run.fill()
    assert {key.number for key in run.running} == {0}, "the others are probed first"
    while run.running:
        end_all(run)
        run.fill()
    assert Counter(key.group for key in run.ended) == dict.fromkeys(NAMES, 4)


def test_a_full_buffer_ranks_nothing_while_a_probe_runs() -> None:
    run = bench(places=4)
    run.fill()
    run.loads.may_begin, run.loads.is_buffer_full = False, True
    for key in list(run.running)[:2]:
        run.end(key, LENGTHS[key.group])
    assert run.fill() == []


def afresh(name: str) -> WaitingGroup:
    return group(name, numbers=(4, 5, 6), num_needed=3, taken=(0,), is_open=True)


def test_what_is_thrown_away_after_its_probe_begins_afresh_as_what_it_was() -> None:
    run, rest = probed()
    for name in ("g2", "g9"):
        run.close(name)
        run.submit(afresh(name))
        run.policy.ended(of(rest, name)[0].rollout, RolloutEnd("aborted", 7, 1.0))  # one of those thrown away
    again = run.fill()
    assert [choice.rollout for choice in again if choice.engine in HEAVY] == [("g9", 4), ("g9", 5), ("g9", 6)]
    where = of(rest, "g2")[0].engine
    later = [choice for choice in again if choice.engine in FAST]
    assert [choice.rollout for choice in later] == [("g2", 4), ("g2", 5), ("g2", 6)]
    assert {(choice.engine, choice.cap_tokens) for choice in later} == {(where, CAP)}


def test_what_is_thrown_away_before_all_probes_are_there_waits_for_them_again() -> None:
    run = bench()
    run.fill()
    for key in [key for key in run.running if key[0] in ("g8", "g9")]:
        run.end(key, LENGTHS[key[0]])
    for name in NAMES:
        run.close(name)
        numbers = (4, 5, 6, 7)
        run.submit(afresh(name) if name in ("g8", "g9") else group(name, numbers=numbers, is_open=True))
    assert {choice.rollout for choice in run.fill()} == {(name, 4) for name in NAMES[:8]}
    for key in list(run.running):
        run.end(key, LENGTHS[key[0]])
    assert {choice.rollout.group for choice in run.fill() if choice.engine in HEAVY} == {"g8", "g9"}
