"""The first difference of two JSON values, and its words."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replay.differences import first_difference

LONG = "Add the two numbers that follow, and give no more than the sum"


def words(one: Any, other: Any) -> str:
    difference = first_difference(one, other)
    assert difference is not None
    return difference.in_words("recorded", "now")


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "a": 1}, "b: recorded 2, now 3"),
        ({"n": 1}, {"n": True}, "n: recorded 1, now true"),
        ({"n": 1}, {"n": 1.0}, "n: recorded 1, now 1.0"),
        ({"a": {"stop": ["x"]}}, {"a": {"stop": ["x", "y"]}}, 'a.stop[1]: recorded nothing, now "y"'),
        ({"a": None}, {}, "a: recorded null, now nothing"),
        ([1, 2], {"a": 1}, 'the value: recorded [1,2], now {"a":1}'),
        ({"text": "ab"}, {"text": "ac"}, 'text differs: recorded "ab", now "ac"'),
        (
            {"messages": [{"role": "user"}, {"content": f"{LONG}: 3+4"}]},
            {"messages": [{"role": "user"}, {"content": f"{LONG}: 3+5"}]},
            'messages[1].content differs from character 67 on: recorded "… give no more than the sum: 3+4", '
            'now "… give no more than the sum: 3+5"',
        ),
    ],
)
def test_the_first_difference_is_named_with_both_values(one: Any, other: Any, said: str) -> None:
    assert words(one, other) == said
    assert first_difference(one, one) is None


def test_long_values_are_cut() -> None:
    assert len(words({"a": list(range(10_000))}, {"a": "x" * 10_000})) < 300


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_there_is_a_difference_exactly_where_the_canonical_texts_differ(one: Any, other: Any) -> None:
    texts = [msgspec.json.encode(value, order="sorted") for value in (one, other)]
    assert (first_difference(one, other) is None) == (texts[0] == texts[1])
