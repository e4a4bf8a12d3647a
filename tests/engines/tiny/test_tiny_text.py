from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.tiny.model import build_tokenizer
from forebay.engines.tiny.recipe import Recipe
from forebay.engines.tiny.rows import MAX_PENDING_TOKENS, TextStream


@cache
def tokenizer() -> Any:
    return build_tokenizer(Recipe())


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str]]:
    stream, pieces = TextStream(tokenizer(), stop), []
    for token in tokenizer().encode(text, add_special_tokens=False):
        stream.push(token)
        pieces.append(stream.take(final=False))
        if stream.stopped_by is not None:
            break
    stream.close()
    return stream, [*pieces, stream.take(final=True)]


# A text that spells a special token is encoded as that, and the stream leaves special tokens out.
@given(st.text(max_size=40).filter(lambda text: not any(each in text for each in tokenizer().get_added_vocab())))
def test_pieces_together_are_the_text(text: str) -> None:
    stream, pieces = feed(text)
    assert "".join(pieces) == stream.text == text


@given(st.text("ab <", max_size=30), st.lists(st.text("ab <", min_size=1, max_size=4), max_size=3))
def test_nothing_of_or_after_the_first_stop_string_is_shown(text: str, stops: list[str]) -> None:
    stream, pieces = feed(text, tuple(stops))
    assert "".join(pieces) == stream.text
    assert text.startswith(stream.text)
    assert not any(stop in stream.text for stop in stops)
    assert (stream.stopped_by is None) == (not any(stop in text for stop in stops))


def test_a_stop_string_is_found_across_tokens() -> None:
    stream, _ = feed("one <end> two", ("<end>",))
    assert (stream.text, stream.stopped_by) == ("one ", "<end>")


def test_half_a_character_is_not_shown() -> None:
    tokens = tokenizer().encode("🚀", add_special_tokens=False)
    stream = TextStream(tokenizer(), ())
    for token in tokens[:-1]:
        stream.push(token)
        assert stream.take(final=False) == ""
    stream.push(tokens[-1])
    assert stream.take(final=False) == "🚀"


def test_half_a_character_at_the_end_is_replaced() -> None:
    stream = TextStream(tokenizer(), ())
    stream.push(tokenizer().encode("🚀", add_special_tokens=False)[0])
    stream.close()
    assert stream.take(final=True) == "\ufffd"


@pytest.mark.parametrize("num_tokens", [MAX_PENDING_TOKENS, 5 * MAX_PENDING_TOKENS])
def test_bytes_that_are_no_text_do_not_pile_up(num_tokens: int) -> None:
    stream, tail = TextStream(tokenizer(), ()), tokenizer().encode("🚀", add_special_tokens=False)[-1]
    for _ in range(num_tokens):
        stream.push(tail)
    assert stream.take(final=False) == "\ufffd" * num_tokens
