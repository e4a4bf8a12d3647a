"""Exclusive time adds up, whatever overlaps whatever."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.telemetry.tracing.exclusive_time import (
    Interval,
    PlainInterval,
    TurnInterval,
    rollout_pieces,
    rollout_shares,
)


def shares(*intervals: PlainInterval, turns: tuple[TurnInterval, ...] = (), end: float = 100) -> dict[str, float]:
    found: dict[str, float] = {}
    for own in rollout_shares(intervals, turns, 0, end).values():
        for name, share in own.items():
            found[name] = found.get(name, 0) + share
    return found


def test_spans_side_by_side_share_their_time_equally() -> None:
    found = shares(Interval("tool", 0, 60), Interval("tool", 30, 60), Interval("environment", 30, 60))
    assert found == {"tool": 30 + 20, "environment": 10, "agent": 40}


def test_a_span_has_no_time_of_its_own_while_one_inside_is_open() -> None:
    found = shares(Interval("solve", 0, 100, "a"), Interval("engine", 20, 60, "b", "a"))
    assert found == {"solve": 60, "engine": 40}


def test_a_span_inside_that_outlives_its_parent_keeps_its_time() -> None:
    """And the one around both has none meanwhile."""
    found = shares(
        Interval("solve", 0, 100, "a"), Interval("ask", 10, 30, "b", "a"), Interval("engine", 20, 60, "c", "b")
    )
    assert found == {"solve": 50, "ask": 10, "engine": 40}


def test_turns_and_attempts_have_no_time_but_belong_to_what_is_around_them() -> None:
    found = shares(
        Interval("attempt", 0, 100, "root"),
        Interval("solve", 0, 100, "a", "root"),
        Interval("turn", 10, 90, "t", "a"),
        Interval("engine", 20, 60, "e", "t"),
        turns=(TurnInterval(0, 10, 90),),
    )
    assert found == {"solve": 60, "engine": 40}


def test_what_nobody_measured_is_the_tools_after_a_turn_that_called_them() -> None:
    turns = (TurnInterval(0, 10, 20, has_tools=True), TurnInterval(1, 50, 60))
    found = shares(Interval("engine", 10, 20), Interval("engine", 50, 60), turns=turns)
    assert found == {"starting": 10, "agent": 40, "engine": 20, "tool": 30}


def test_after_the_reward_nothing_is_a_tools_any_more() -> None:
    turns = (TurnInterval(0, 10, 20, has_tools=True),)
    found = shares(Interval("engine", 10, 20), Interval("reward", 50, 60), turns=turns)
    assert found == {"starting": 10, "agent": 40, "engine": 10, "tool": 30, "reward": 10}


def test_a_write_before_the_first_turn_ends_no_tool() -> None:
    turns = (TurnInterval(0, 10, 20, has_tools=True),)
    found = shares(Interval("write", 0, 5), Interval("engine", 10, 20), turns=turns, end=30)
    assert found == {"write": 5, "starting": 5, "engine": 10, "tool": 10}


def test_within_a_turn_what_nobody_measured_is_the_agents() -> None:
    found = shares(Interval("engine", 10, 20), turns=(TurnInterval(0, 10, 40, has_tools=True),), end=50)
    assert found == {"starting": 10, "agent": 20, "engine": 10, "tool": 10}


def test_what_reaches_into_the_next_turn_is_split_there() -> None:
    turns = (TurnInterval(0, 0, 10), TurnInterval(1, 40, 50))
    found = list(rollout_pieces([Interval("tool", 20, 60)], turns, 0, 60))
    assert found[-2:] == [(20, 40, ("tool",), 0), (40, 60, ("tool",), 1)]


def test_without_a_turn_nothing_has_a_number() -> None:
    assert list(rollout_pieces([], [], 0, 5)) == [(0, 5, ("agent",), None)]


def test_what_lies_outside_is_cut_off() -> None:
    found = shares(Interval("a", -5, 3), Interval("b", 8, 20), Interval("c", 30, 40), end=10)
    assert found == {"a": 3, "agent": 5, "b": 2}


def test_parents_in_a_circle_end_nothing() -> None:
    found = shares(Interval("x", 0, 50, "a", "b"), Interval("y", 10, 60, "b", "a"), end=60)
    assert sum(found.values()) == pytest.approx(60)


MOMENTS = st.integers(0, 1_000)
INTERVALS = st.lists(
    st.builds(
        lambda name, moments, own, up: (name, min(moments), max(moments), own, up),
        st.sampled_from(["engine", "tool", "turn", "reward", "solve"]),
        st.tuples(MOMENTS, MOMENTS),
        st.sampled_from("abcdef"),
        st.sampled_from(["", *"abcdef"]),
    ),
    max_size=12,
)
TURNS = st.lists(
    st.builds(lambda at, has_tools: TurnInterval(at, at, at + 20, has_tools), MOMENTS, st.booleans()), max_size=4
)


@given(INTERVALS, TURNS)
def test_all_pieces_add_up_without_a_hole(intervals: list[PlainInterval], turns: list[TurnInterval]) -> None:
    found = list(rollout_pieces(intervals, turns, 100, 900))
    assert [found[0][0], found[-1][1]] == [100, 900]
    assert all(end == begin and names for (_, end, names, _), (begin, *_) in itertools.pairwise(found))
    by_turn = rollout_shares(intervals, turns, 100, 900)
    assert sum(sum(each.values()) for each in by_turn.values()) == pytest.approx(800)
    assert {turn for *_, turn in found} == set(by_turn)
