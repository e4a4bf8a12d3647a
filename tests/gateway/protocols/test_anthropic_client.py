"""Anthropic's official client, whole and streaming."""

from typing import TYPE_CHECKING, Any

import pytest

from forebay.engines.scripted import Reply
from tests.gateway.protocols.conftest import Front, tool_call

if TYPE_CHECKING:
    from anthropic.types import Message

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 500}
HELLO = {"role": "user", "content": "hello"}
# Spelled as no template would: with blanks missing, a number with a zero, keys out of order.
ODD_CALLS = [
    tool_call("weather", '{"town":"Köln","days":2.0}', "call_a"),
    tool_call("weather", '{"days": 1,  "town": "Bonn"}', "call_b", index=1),
]


async def say(front: Front, *, stream: bool, **asked: Any) -> "Message":
    if not stream:
        return await front.anthropic.messages.create(**{**ASKED, **asked})
    async with front.anthropic.messages.stream(**{**ASKED, **asked}) as events:
        return await events.get_final_message()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_text(front: Front, stream: bool) -> None:
    front("four, I think")
    message = await say(front, stream=stream, system="Count.", messages=[{"role": "user", "content": "2 + 2?"}])
    prompt, sampled = len(front.calls[0].prompt_ids), len(front.calls[0].sampled_ids)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "four, I think"}]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (prompt, sampled)
    assert message.id.startswith("msg_")
    assert front.chats[-1]["messages"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "2 + 2?"},
    ]


async def test_an_answer_cut_at_its_limit(front: Front, stream: bool) -> None:
    front(Reply(text="four", finish_reason="length"))
    message = await say(front, stream=stream, messages=[HELLO])
    assert message.stop_reason == "max_tokens"


async def test_thinking_and_parallel_calls(front: Front, stream: bool) -> None:
    front(Reply(reasoning="hm, two towns", text="Let me see.", tool_calls=ODD_CALLS))
    message = await say(front, stream=stream, messages=[HELLO], tools=[WEATHER])
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hm, two towns")
    assert thinking.signature  # clients drop thoughts without one
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (first.type, first.id, first.name, first.input) == (
        *("tool_use", "call_a", "weather"),
        {"town": "Köln", "days": 2.0},
    )
    assert (second.id, second.input) == ("call_b", {"days": 1, "town": "Bonn"})
    assert message.stop_reason == "tool_use"


async def test_a_conversation_with_tools_gives_the_engine_its_own_words_again(front: Front, stream: bool) -> None:
    front(Reply(text=" one  moment\n", tool_calls=ODD_CALLS), "It rains.")
    message = await say(front, stream=stream, messages=[HELLO], tools=[WEATHER])
    results = [{"type": "tool_result", "tool_use_id": name, "content": "rain"} for name in ("call_a", "call_b")]
    history = [HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    await say(front, stream=stream, messages=history, tools=[WEATHER])
    before, after = front.chats
    assert after["messages"][: len(before["messages"])] == before["messages"]
    reply, *new = after["messages"][len(before["messages"]) :]
    assert [call["function"]["arguments"] for call in reply["tool_calls"]] == [
        call["function"]["arguments"] for call in ODD_CALLS
    ]
    assert reply["content"] == " one  moment\n"
    assert [message["role"] for message in new] == ["tool", "tool"]


async def test_a_text_conversation_continues_the_tokens_of_the_last_turn(front: Front, stream: bool) -> None:
    front(" twenty-two \n", "yes")
    message = await say(front, stream=stream, messages=[HELLO])
    history = [HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": "sure?"}]
    await say(front, stream=stream, messages=history)
    held = front.calls[0].prompt_ids + front.calls[0].sampled_ids
    assert front.calls[1].prompt_ids[: len(held)] == held


async def test_the_clients_own_tool_runner(front: Front, stream: bool) -> None:
    import anthropic

    @anthropic.beta_async_tool
    async def weather(town: str, days: float) -> str:
        return f"rain in {town} for {days:g} days"

    front(Reply(reasoning="two towns", tool_calls=ODD_CALLS), "It rains.")
    asked: dict[str, Any] = {**ASKED, "messages": [HELLO], "tools": [weather], "stream": stream}
    runner: Any = front.anthropic.beta.messages.tool_runner(**asked)
    answers = [await (answer.get_final_message() if stream else as_it_is(answer)) async for answer in runner]
    assert answers[-1].content[0].text == "It rains."
    reply, *results = front.chats[-1]["messages"][1:]
    assert [call["function"] for call in reply["tool_calls"]] == [call["function"] for call in ODD_CALLS]
    assert [result["content"] for result in results] == ["rain in Köln for 2 days", "rain in Bonn for 1 days"]


async def as_it_is(answer: Any) -> Any:
    return answer


async def test_without_a_memo_arguments_come_back_as_templates_write_them(front: Front) -> None:
    front(Reply(tool_calls=ODD_CALLS), "ok", remembers=False)
    message = await say(front, stream=False, messages=[HELLO], tools=[WEATHER])
    await say(front, stream=False, messages=[HELLO, {"role": "assistant", "content": message.content}], tools=[WEATHER])
    calls = front.chats[-1]["messages"][-1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [
        '{"town": "Köln", "days": 2.0}',
        '{"days": 1, "town": "Bonn"}',
    ]


async def test_events_come_in_the_official_order(front: Front) -> None:
    front(Reply(text="so", tool_calls=ODD_CALLS))
    events = await front.anthropic.messages.create(**ASKED, messages=[HELLO], tools=[WEATHER], stream=True)
    told = [event async for event in events]
    kinds = [event.type for event in told]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    squeezed = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert squeezed == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    starts = [event.index for event in told if event.type == "content_block_start"]
    assert starts == [0, 1, 2]


async def test_tokens_are_counted_as_the_prompt_has_them(front: Front) -> None:
    front("ok")
    asked = {"model": "scripted", "system": "Count.", "messages": [HELLO], "tools": [WEATHER]}
    counted = await front.anthropic.messages.count_tokens(**asked)
    message = await front.anthropic.messages.create(**asked, max_tokens=5)
    assert counted.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, "BadRequestError", "invalid_request_error"),
        (404, "NotFoundError", "not_found_error"),
        (429, "RateLimitError", "rate_limit_error"),
        (500, "InternalServerError", "api_error"),
        (503, "InternalServerError", "overloaded_error"),
    ],
)
async def test_an_error_of_the_engine(front: Front, stream: bool, status: int, error: str, kind: str) -> None:
    import anthropic

    front(Reply(text="the prompt is too long", error_status=status))
    with pytest.raises(getattr(anthropic, error)) as caught:
        await say(front, stream=stream, messages=[HELLO])
    assert caught.value.status_code == status
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "the prompt is too long"}}


async def test_a_refused_request_does_not_reach_the_engine(front: Front, stream: bool) -> None:
    import anthropic

    front()
    with pytest.raises(anthropic.BadRequestError) as caught:
        await say(front, stream=stream, messages=[HELLO], extra_body={"top_k": "red"})
    assert front.calls == []
    assert caught.value.body["error"]["message"].startswith("top_k: Input should be a valid integer")


async def test_an_answer_that_the_engine_broke_off_is_an_error(front: Front, stream: bool) -> None:
    import anthropic

    front(Reply(text="half an", finish_reason="abort"))
    with pytest.raises(anthropic.APIStatusError, match="did not finish the answer: abort"):
        await say(front, stream=stream, messages=[HELLO])
