"""Streams that engines send and nobody expects: the events stay whole, and a failure is told."""

from collections.abc import Callable
from typing import Any

import pytest

from forebay.gateway.dialects.anthropic.stream import MessagesStream
from forebay.gateway.dialects.chunks import TranslatedStream as Stream
from forebay.gateway.dialects.dialect import CrossCallState, ResponsesDialect
from forebay.gateway.dialects.history import ReplyMemo

Json = dict[str, Any]
TOOL = {"type": "function", "name": "tool", "parameters": {}}


def responses_stream() -> Any:
    dialect = ResponsesDialect(CrossCallState())
    dialect.to_chat({"model": "m", "input": "hi", "tools": [TOOL]})
    return dialect.stream()


PROTOCOLS: dict[str, Callable[[], Stream]] = {
    "messages": lambda: MessagesStream({"model": "m", "stop_sequences": ["END"]}, ReplyMemo()),
    "responses": responses_stream,
}


@pytest.fixture(params=list(PROTOCOLS))
def stream(request: pytest.FixtureRequest) -> Stream:
    return PROTOCOLS[request.param]()


def chunk(finish_reason: str | None = None, **delta: Any) -> Json:
    return {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def call(index: int, name: str | None = None, arguments: str = "") -> Json:
    part: Json = {"index": index, "function": {"arguments": arguments}}
    if name:
        part |= {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return chunk(tool_calls=[part])


def fed(stream: Stream, *chunks: Json) -> list[Json]:
    return [event for part in chunks for event in stream.feed(part)] + stream.end()


def failure(stream: Stream, events: list[Json]) -> str:
    """The message of the error that ends a stream, everything that was begun being ended before it."""
    assert stream.is_over
    begun = [event for event in events if event["type"] in ("content_block_start", "response.output_item.added")]
    ended = [event for event in events if event["type"] in ("content_block_stop", "response.output_item.done")]
    assert len(begun) == len(ended)
    last = events[-1]
    assert last["type"] in ("error", "response.failed")
    return str(last.get("response", last)["error"]["message"])


def test_a_stream_that_ends_without_a_reason_has_failed(stream: Stream) -> None:
    assert "no finish reason" in failure(stream, fed(stream, chunk(content="half an")))


def test_a_stream_of_nothing_has_failed(stream: Stream) -> None:
    assert "no finish reason" in failure(stream, fed(stream))


def test_an_error_in_mid_stream_is_told_once(stream: Stream) -> None:
    broken = {"error": {"object": "error", "message": "out of memory", "type": "ServerError", "code": 500}}
    events = fed(stream, chunk(content="half an"), broken, chunk(content="ignored"))
    assert failure(stream, events) == "out of memory"


def test_the_gateway_can_break_a_stream_off(stream: Stream) -> None:
    events = [*stream.feed(chunk(content="half an")), *stream.fail(504, {"error": {"message": "the deadline passed"}})]
    assert failure(stream, events) == "the deadline passed"
    assert stream.end() == []


def test_arguments_of_a_call_that_had_ended(stream: Stream) -> None:
    events = fed(stream, call(0, "tool", "{"), call(1, "tool", "{}"), call(0, arguments="}"))
    assert "arguments for a call that had already ended" in failure(stream, events)


def test_what_came_with_them_is_told_all_the_same(stream: Stream) -> None:
    misfit = {"index": 0, "function": {"arguments": "}"}}
    events = fed(stream, call(0, "tool", "{"), call(1, "tool", "{}"), chunk(content="so", tool_calls=[misfit]))
    assert "arguments for a call that had already ended" in failure(stream, events)
    assert "so" in [
        event["delta"] if isinstance(event["delta"], str) else event["delta"].get("text")
        for event in events
        if "delta" in event
    ]


def test_blanks_between_calls_are_no_text(stream: Stream) -> None:
    events = fed(stream, call(0, "tool", "{}"), chunk(content="\n"), call(1, "tool", "{}"), chunk("tool_calls"))
    kinds = [event["type"] for event in events]
    assert sum(kind in ("content_block_start", "response.output_item.added") for kind in kinds) == 2


def test_a_text_after_a_call_keeps_its_blanks(stream: Stream) -> None:
    events = fed(stream, call(0, "tool", "{}"), chunk(content="\n"), chunk(content="so"), chunk("stop"))
    texts = [
        event["delta"] for event in events if event["type"] in ("content_block_delta", "response.output_text.delta")
    ]
    assert texts[-1] in ({"type": "text_delta", "text": "\nso"}, "\nso")


def test_a_second_choice_is_left_out(stream: Stream) -> None:
    other = {"model": "m", "choices": [{"index": 1, "delta": {"content": "other"}, "finish_reason": "stop"}]}
    events = fed(stream, chunk(content="one"), other, chunk("stop"))
    assert "other" not in str(events)


def test_the_stop_sequence_that_was_met_is_told() -> None:
    stream = PROTOCOLS["messages"]()
    end = {"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": "END"}
    events = fed(stream, chunk(content="so"), {"model": "m", "choices": [end]})
    (delta,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_counts_are_told_as_soon_as_they_are_known() -> None:
    stream = PROTOCOLS["messages"]()
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 5}}
    assert stream.feed(chunk(role="assistant", content="")) == []
    start, *_ = stream.feed({**chunk(content="so"), "usage": usage})
    assert start["message"]["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": 0,
    }


def test_the_phase_of_a_message_is_known_at_its_end() -> None:
    for more, phase in (([call(0, "tool", "{}")], "commentary"), ([], "final_answer")):
        events = fed(PROTOCOLS["responses"](), chunk(content="so"), *more, chunk("stop"))
        items = [event["item"] for event in events if "item" in event and event["item"]["type"] == "message"]
        assert [item["phase"] for item in items] == [None, phase]


def test_an_empty_answer_is_an_empty_message() -> None:
    events = fed(PROTOCOLS["responses"](), chunk("stop"))
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
