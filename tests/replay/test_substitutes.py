"""The rule of ``repeat``."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.replay.substitutes import substitute


@pytest.mark.parametrize(("wanted", "given_step"), [(5, 5), (12, 5), (3, 5), (20, 20), (99, 20)])
def test_itself_else_the_largest_smaller_else_the_smallest_larger(wanted: int, given_step: int) -> None:
    assert substitute(wanted, {5, 20}) == given_step


def test_there_is_no_substitute_where_there_is_nothing() -> None:
    assert substitute(5, ()) is None


@settings(max_examples=60)
@given(st.integers(), st.sets(st.integers(), min_size=1))
def test_nothing_of_those_that_are_there_would_have_come_first(wanted: int, available: set[int]) -> None:
    def order(step: int) -> tuple[bool, bool, int]:
        return (step != wanted, step > wanted, step if step > wanted else -step)

    assert substitute(wanted, available) == min(available, key=order)
