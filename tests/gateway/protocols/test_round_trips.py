"""An answer that comes back as history is the answer that the engine gave, whatever it was and however it was cut."""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.gateway.dialects.dialect import CrossCallState, Dialect, MessagesDialect, ResponsesDialect
from forebay.gateway.dialects.history import assistant_message

Json = dict[str, Any]
FINAL = {"model": "m", "created": 1, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
USER = {"role": "user", "content": "more"}
quickly = settings(max_examples=40, deadline=None)
TOOLS = [{"type": "function", "name": "tool", "parameters": {}}]

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e6, 1e6).map(float) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=3)
blanks = st.sampled_from(["", " ", "\n", "  "])


@st.composite
def odd_json(draw: st.DrawFn) -> str:
    """An object in a spelling of its own."""
    separators = (f"{draw(blanks)},{draw(blanks)}", f"{draw(blanks)}:{draw(blanks)}")
    text = json.dumps(draw(objects), ensure_ascii=draw(st.booleans()), separators=separators)
    return draw(blanks) + text + draw(blanks)


@st.composite
def messages(draw: st.DrawFn) -> Json:
    """The message of a chat reply."""
    arguments = draw(st.lists(odd_json(), max_size=3))
    calls = [
        {"id": f"call_{at}", "index": at, "type": "function", "function": {"name": "tool", "arguments": text}}
        for at, text in enumerate(arguments)
    ]
    content = draw(st.none() | st.text(max_size=20)) if calls else draw(st.text(max_size=20))
    thought = draw(st.none() | st.text(max_size=20))
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": calls or None}


def whole(message: Json) -> Json:
    finish = "tool_calls" if message["tool_calls"] else "stop"
    return {**FINAL, "choices": [{"index": 0, "message": message, "finish_reason": finish, "matched_stop": None}]}


@st.composite
def streams(draw: st.DrawFn) -> tuple[Json, list[Json]]:
    """A message and the chunks that it might come in: reasoning, text, calls; blanks between the calls."""
    message = draw(messages())
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: part} for part in draw(pieces(message[name] or ""))]
    for call in message["tool_calls"] or []:
        function = {"name": "tool", "arguments": ""}
        deltas.append({"tool_calls": [{**call, "function": function}]})
        for part in draw(pieces(call["function"]["arguments"])):
            deltas.append({"tool_calls": [{"index": call["index"], "function": {"arguments": part}}]})
        blank = draw(blanks)
        deltas.append({"content": blank})
        message = {**message, "content": (message["content"] or "") + blank}
    chunks = [{"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": whole(message)["choices"][0]["finish_reason"]}
    return message, [*chunks, {"model": "m", "choices": [end]}, {"choices": [], "usage": FINAL["usage"]}]


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """A text in parts."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def as_a_client_writes_it(value: Any) -> Any:
    """As clients in JavaScript do: a number without a fraction is an integer."""
    if isinstance(value, Mapping):
        return {name: as_a_client_writes_it(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_a_client_writes_it(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def begun(kind: type[Dialect]) -> Dialect:
    """A call that an engine is asked for."""
    dialect = kind(CrossCallState())
    if kind is MessagesDialect:
        dialect.to_chat({"model": "m", "max_tokens": 9, "messages": [USER]})
    else:
        dialect.to_chat({"model": "m", "input": "more", "tools": TOOLS})
    return dialect


def anthropic_turn(content: list[Json]) -> Json:
    history = [{"role": "assistant", "content": as_a_client_writes_it(content)}, USER]
    return {"model": "m", "max_tokens": 9, "messages": [USER, *history]}


@quickly
@given(messages())
def test_messages_whole(message: Json) -> None:
    dialect = begun(MessagesDialect)
    told = json.loads(json.dumps(dialect.reply(whole(message))))
    chat = MessagesDialect(dialect.memory).to_chat(anthropic_turn(told["content"]))
    assert chat["messages"] == [USER, assistant_message(message), USER]


@quickly
@given(streams())
def test_messages_streamed(stream: tuple[Json, list[Json]]) -> None:
    message, chunks = stream
    dialect = begun(MessagesDialect)
    events = dialect.stream()
    told = [event for chunk in chunks for event in events.feed(chunk)] + events.end()
    chat = MessagesDialect(dialect.memory).to_chat(anthropic_turn(blocks(told)))
    assert chat["messages"] == [USER, assistant_message(message), USER]


def blocks(events: list[Json]) -> list[Json]:
    """The content that a client adds up."""
    content: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            for name, field in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                if name in delta:
                    content[event["index"]][field] += delta[name]
    for block in content:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text) if text else {}
    return content


@quickly
@given(messages())
def test_responses_whole(message: Json) -> None:
    dialect = begun(ResponsesDialect)
    told = json.loads(json.dumps(dialect.reply(whole(message))))
    expect_same(message, told, dialect.memory)


@quickly
@given(streams())
def test_responses_streamed(stream: tuple[Json, list[Json]]) -> None:
    message, chunks = stream
    dialect = begun(ResponsesDialect)
    events = dialect.stream()
    told = [event for chunk in chunks for event in events.feed(chunk)] + events.end()
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    final = told[-1]["response"]
    assert done == final["output"]
    expect_same(message, final, dialect.memory)


def expect_same(message: Json, told: Json, memory: CrossCallState) -> None:
    """Whether the client hands the items back or names the answer."""
    kept = {"model": "m", "input": [USER, *told["output"], USER], "tools": TOOLS}
    named = {"model": "m", "input": [USER], "previous_response_id": told["id"], "tools": TOOLS}
    for body in (kept, named):
        assert ResponsesDialect(memory).to_chat(body)["messages"] == [USER, assistant_message(message), USER]
