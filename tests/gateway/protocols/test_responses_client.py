"""OpenAI's official client on the Responses API, whole and streaming."""

from itertools import chain
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from forebay.engines.scripted import Reply
from tests.gateway.protocols.conftest import Front, tool_call

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": True,
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes a file."}
CALLS = [
    tool_call("weather", '{"town":"Köln","days":2.0}', "call_a"),
    tool_call("weather", '{"days": 1,  "town": "Bonn"}', "call_b", index=1),
]


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def ask(front: Front, *, stream: bool, **asked: Any) -> Response:
    asked = {"model": "scripted", "input": "hello", **asked}
    if not stream:
        return await front.openai.responses.create(**asked)
    async with front.openai.responses.stream(**asked) as events:
        async for event in events:
            if event.type in ("response.incomplete", "response.failed"):
                return event.response
        return await events.get_final_response()


async def test_a_text(front: Front, stream: bool) -> None:
    front("four, I think")
    response = await ask(front, stream=stream, instructions="Count.", input="2 + 2?", metadata={"task": "7"})
    assert (response.output_text, response.status) == ("four, I think", "completed")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        len(front.calls[0].prompt_ids),
        len(front.calls[0].sampled_ids),
    )
    assert (response.instructions, response.metadata) == ("Count.", {"task": "7"})
    assert front.chats[-1]["messages"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "2 + 2?"},
    ]


async def test_an_answer_cut_at_its_limit(front: Front, stream: bool) -> None:
    front("a long story")
    response = await ask(front, stream=stream, max_output_tokens=6)
    assert (response.status, response.output_text) == ("incomplete", "a long")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"


async def test_reasoning_and_parallel_calls(front: Front, stream: bool) -> None:
    front(Reply(reasoning="hm, two towns", text="Let me see.", tool_calls=CALLS))
    response = await ask(front, stream=stream, tools=[WEATHER])
    reasoning, message, first, second = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "hm, two towns", [])
    assert (message.type, message.content[0].text, message.phase) == ("message", "Let me see.", "commentary")
    assert (first.type, first.call_id, first.arguments) == ("function_call", "call_a", '{"town":"Köln","days":2.0}')
    assert (second.call_id, second.arguments) == ("call_b", '{"days": 1,  "town": "Bonn"}')


@pytest.mark.parametrize("keeps", ["client", "server"])
async def test_a_conversation_with_tools_gives_the_engine_its_own_words_again(
    front: Front, stream: bool, keeps: str
) -> None:
    front(Reply(text=" one  moment\n", tool_calls=CALLS), "It rains.", "Yes.")
    items: list[Any] = [{"role": "user", "content": "hello"}]
    previous: dict[str, Any] = {}
    asked = items
    for results in ([("call_a", "rain"), ("call_b", "sun")], [], None):
        response = await ask(front, stream=stream, tools=[WEATHER], input=asked, **previous)
        if results is not None:
            new = [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results]
            new += [{"role": "user", "content": "sure?"}] * (not results)
            items = [*items, *response.output, *new]
            asked, previous = (items, {}) if keeps == "client" else (new, {"previous_response_id": response.id})
    first, second, third = (chat["messages"] for chat in front.chats)
    assert second[:1] == first
    assert third[: len(second)] == second
    reply = second[1]
    assert [call["function"] for call in reply["tool_calls"]] == [call["function"] for call in CALLS]
    assert reply["content"] == " one  moment\n"
    held = front.calls[1].prompt_ids + front.calls[1].sampled_ids
    assert front.calls[2].prompt_ids[: len(held)] == held


async def test_a_custom_tool(front: Front, stream: bool) -> None:
    front(Reply(tool_calls=[tool_call("patch", '{"input": "- a\\n+ b"}')]), "done")
    response = await ask(front, stream=stream, tools=[PATCH])
    (call,) = response.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "- a\n+ b")
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    await ask(front, stream=stream, tools=[PATCH], input=[*response.output, output])
    assert front.chats[-1]["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"input": "- a\\n+ b"}'


async def test_a_summary_and_packed_reasoning_for_a_client_that_keeps_the_state(front: Front, stream: bool) -> None:
    front(Reply(reasoning="two and two", text="4"), "yes")
    asked = {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    response = await ask(front, stream=stream, store=False, **asked)
    reasoning = response.output[0]
    assert reasoning.summary[0].text == "two and two"
    bare = {"type": "reasoning", "id": reasoning.id, "summary": [], "encrypted_content": reasoning.encrypted_content}
    await ask(front, stream=stream, input=[bare, *response.output[1:], {"role": "user", "content": "sure?"}])
    assert front.chats[-1]["messages"][0] == {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    assert front.chats[0]["reasoning_effort"] == "low"


async def test_events_come_in_the_official_order(front: Front) -> None:
    front(Reply(reasoning="hm", text="so", tool_calls=CALLS))
    events = await front.openai.responses.create(model="scripted", input="hello", tools=[WEATHER], stream=True)
    told = [event async for event in events]
    kinds = [event.type for event in told]
    squeezed = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    reasoning = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *events, "output_item.done"] for events in (reasoning, text, call, call)]
    expected = ["created", "in_progress", *chain.from_iterable(items), "completed"]
    assert squeezed == [f"response.{kind}" for kind in expected]
    assert [event.sequence_number for event in told] == list(range(len(told)))
    added = [event.output_index for event in told if event.type == "response.output_item.added"]
    assert added == [0, 1, 2, 3]


async def test_a_stored_response_is_found_and_deleted(front: Front, stream: bool) -> None:
    front("kept", "not kept")
    kept = await ask(front, stream=stream)
    other = await ask(front, stream=stream, store=False)
    assert (await front.openai.responses.retrieve(kept.id)).output_text == "kept"
    await front.openai.responses.delete(kept.id)
    for response in (kept, other):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{response.id}' not found"):
            await ask(front, stream=stream, previous_response_id=response.id)


async def test_an_item_named_by_its_id(front: Front) -> None:
    front("first", "second")
    response = await ask(front, stream=False)
    await ask(front, stream=False, input=[{"type": "item_reference", "id": response.output[0].id}])
    assert front.chats[-1]["messages"] == [{"role": "assistant", "content": "first"}]


async def test_logprobs_of_the_text(front: Front) -> None:
    front("four")
    response = await ask(front, stream=False, include=["message.output_text.logprobs"])
    told = response.output[0].content[0].logprobs
    assert "".join(token.token for token in told).startswith("four")


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, openai.BadRequestError), (429, openai.RateLimitError), (500, openai.InternalServerError)],
)
async def test_an_error_of_the_engine(
    front: Front, stream: bool, status: int, error: type[openai.APIStatusError]
) -> None:
    front(Reply(text="the prompt is too long", error_status=status))
    with pytest.raises(error, match="the prompt is too long") as caught:
        await ask(front, stream=stream)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.body["code"] == status


async def test_a_refused_request_does_not_reach_the_engine(front: Front, stream: bool) -> None:
    front()
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(front, stream=stream, extra_body={"top_k": "red"})
    assert front.calls == []
    assert (caught.value.param, caught.value.type) == ("top_k", "invalid_request_error")


async def test_an_answer_that_the_engine_broke_off_has_failed(front: Front, stream: bool) -> None:
    front(Reply(text="half an", finish_reason="abort"))
    response = await ask(front, stream=stream)
    assert response.status == "failed"
    assert response.error is not None
    assert "abort" in response.error.message
