"""The official clients before the gateway: what they cannot tell from an engine, and what is recorded of them."""

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from forebay.engines.capture.request_fields import texts_only
from forebay.engines.scripted import Reply, ScriptedCall
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import USER, Json, OpenedAt, assert_whole

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD: Json = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL: Json = {"type": "function", "function": ADD}
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TWO = [CALL, {**CALL, "id": "call_2"}]
SHARED: list[Json] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"n": 2},
    {"n": 2, "stream": True},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "stream": True},
    {"tools": [TOOL]},
    {"tools": [TOOL], "stream": True, "temperature": 1.0},
    {"max_tokens": 3},
    {"stop": ["four"]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    {"extra_body": {"return_token_ids": True}},
    {"extra_body": {"return_output_ids_in_sglext": True}, "stream": True},
]


def script(call: ScriptedCall) -> Reply:
    return Reply(text="", tool_calls=TWO) if call.body.get("tools") else Reply(text="it is four, I think")


async def told(client: openai.AsyncOpenAI, fields: Json) -> Any:
    """Everything that the official client sees of a call, but for what no two calls share."""
    answer = await client.chat.completions.create(model="m", messages=[USER], **fields)
    if fields.get("stream"):
        return [_plain(chunk.model_dump(warnings=False)) async for chunk in answer]
    return _plain(answer.model_dump(warnings=False))


def _plain(answer: Json) -> Json:
    return {**answer, "id": bool(answer["id"]), "created": bool(answer["created"])}


@pytest.mark.parametrize("fields", SHARED, ids=lambda fields: ",".join(fields) or "plain")
async def test_the_openai_client_sees_what_the_engine_tells(stage: Stage, fields: Json) -> None:
    stage(script)
    rollout = await stage.open()
    async with (
        rollout.client() as through,
        openai.AsyncOpenAI(base_url=f"{stage.engine.url}/v1", api_key="k", max_retries=0) as directly,
    ):
        # But for the numbers of its metadata, which the protocol has not.
        seen = await told(directly, fields)
        assert await told(through, fields) == (seen if isinstance(seen, list) else texts_only(seen))
    ended = await rollout.close()
    assert len(ended["samples"]) == fields.get("n", 1)
    for sample in ended["samples"]:
        assert_whole(sample)


async def test_one_header_is_added(stage: Stage) -> None:
    stage(script)
    rollout = await stage.open()
    body = {"model": "m", "messages": [USER]}
    directly = await stage.gateway.http.post(f"{stage.engine.url}/v1/chat/completions", json=body)
    through = await rollout.post("chat/completions", body)
    own = {"date", "server"}
    assert set(through.headers) - own == set(directly.headers) - own | {"x-forebay-rollout-id"}
    assert through.headers["x-forebay-rollout-id"] == rollout.rollout_id


async def test_models_are_the_engines(stage: Stage) -> None:
    rollout = await stage.open()
    async with rollout.client() as client:
        assert [model.id async for model in client.models.list()] == ["scripted"]


# --- Responses


async def test_a_conversation_over_responses_is_one_sample(stage: Stage) -> None:
    stage(script)
    rollout = await stage.open()
    async with rollout.client() as client:
        first = await client.responses.create(model="m", input="2+2?", store=True)
        assert first.output_text == "it is four, I think"
        second = await client.responses.create(model="m", input="sure?", previous_response_id=first.id)
        assert (await client.responses.retrieve(first.id)).id == first.id
        assert len((await client.responses.input_items.list(second.id)).data) == 1
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
    (sample,) = (await rollout.close())["samples"]
    assert_whole(sample)
    assert len(sample["messages"]) == 4


async def test_responses_stream_and_call_tools(stage: Stage) -> None:
    stage(script)
    rollout = await stage.open()
    tool = {"type": "function", **ADD}
    asked: Any = {"model": "m", "input": "2+2?", "tools": [tool], "temperature": 1.0}
    async with rollout.client() as client, client.responses.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert [item.call_id for item in final.output if item.type == "function_call"] == ["call_1", "call_2"]
    assert_whole((await rollout.close())["samples"][0])


# --- Anthropic


def claude(rollout: OpenedAt) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(base_url=rollout.anthropic_url, api_key=rollout.key, max_retries=0)


async def test_a_conversation_over_messages_is_one_sample(stage: Stage) -> None:
    def answer(call: ScriptedCall) -> Reply:
        return Reply(text="adding", tool_calls=[CALL]) if len(call.messages) == 1 else Reply(text="four")

    stage(answer)
    rollout = await stage.open()
    tool = {"name": "add", "input_schema": ADD["parameters"]}
    async with claude(rollout) as client:
        messages: list[Any] = [USER]
        first = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=[tool])
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "2"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(model="m", max_tokens=99, messages=messages, tools=[tool]) as stream:
            assert [text async for text in stream.text_stream] == ["four"]
        counted = await client.messages.count_tokens(model="m", messages=messages)
    ended = await rollout.close()
    (sample,) = ended["samples"]
    assert_whole(sample)
    assert 0 < counted.input_tokens < len(sample["tokens"])
    assert ended["num_calls"] == 3


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_drops_unsigned_thoughts_sends_those_of_messages_back(
    stage: Stage, is_streamed: bool
) -> None:
    stage(lambda call: Reply(reasoning="two and two", text="four") if len(call.messages) == 1 else Reply(text="yes"))
    rollout = await stage.open()
    async with claude(rollout) as client:
        asked: Json = {"model": "m", "max_tokens": 99}
        if is_streamed:
            async with client.messages.stream(**asked, messages=[USER]) as stream:
                first = await stream.get_final_message()
        else:
            first = await client.messages.create(**asked, messages=[USER])
        kept = [block for block in first.content if block.type != "thinking" or block.signature]
        history: list[Any] = [USER, {"role": "assistant", "content": kept}, {"role": "user", "content": "sure?"}]
        await client.messages.create(**asked, messages=history)
    assert stage.engine.calls[-1].messages[1]["reasoning_content"] == "two and two"


async def test_a_streamed_messages_call_that_was_cut_off_can_be_sent_back_as_the_text_that_came(stage: Stage) -> None:
    cut = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "no'}}

    def answer(call: ScriptedCall) -> Reply:
        return Reply(tool_calls=[cut], finish_reason="length") if len(call.messages) == 1 else Reply(text="again?")

    stage(answer)
    rollout = await stage.open()
    tool = {"name": "add", "input_schema": ADD["parameters"]}
    async with claude(rollout) as client:
        asked: Json = {"model": "m", "max_tokens": 99, "tools": [tool]}
        events = [event async for event in await client.messages.create(**asked, messages=[USER], stream=True)]
        text = "".join(getattr(event.delta, "partial_json", "") for event in events if hasattr(event, "delta"))
        assert (text, events[-2].delta.stop_reason) == (cut["function"]["arguments"], "max_tokens")
        call = {"type": "tool_use", "id": CALL["id"], "name": "add", "input": text}
        result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": "cut off", "is_error": True}
        history = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        reply = await client.messages.create(**asked, messages=history)
    assert reply.content[0].text == "again?"
    (sent,) = stage.engine.calls[-1].messages[1]["tool_calls"]
    assert sent["function"]["arguments"] in ("{}", {})  # engines refuse arguments that are not JSON


async def test_errors_come_in_the_words_of_the_protocol(stage: Stage) -> None:
    import anthropic

    stage(Reply(text="no such thing", error_status=400))
    rollout = await stage.open()
    async with claude(rollout) as client:
        with pytest.raises(anthropic.BadRequestError, match="no such thing"):
            await client.messages.create(model="m", max_tokens=9, messages=[USER])
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(model="m", max_tokens=0, messages=[USER])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()
        no_json = await stage.gateway.http.post(
            f"{rollout.anthropic_url}/v1/messages", content=b"no", headers={"x-api-key": rollout.key}
        )
        assert no_json.json()["error"]["type"] == "invalid_request_error"
        await rollout.close()
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="m", max_tokens=9, messages=[USER])
    async with rollout.client() as client:
        with pytest.raises(openai.AuthenticationError):
            await client.responses.create(model="m", input="2+2?")


async def test_a_rollout_that_ends_while_it_streams_says_so_in_the_protocol(stage: Stage) -> None:
    from anthropic import APIStatusError

    stage(Reply(text="begun", hang=True))
    rollout = await stage.open()
    async with claude(rollout) as client:
        asking = asyncio.create_task(_streamed(client))
        await stage.busy()
        while not stage.calls[0].sampled_ids:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.005)
        await rollout.close()
        with pytest.raises(APIStatusError, match="this rollout is over"):
            await asking


async def _streamed(client: "AsyncAnthropic") -> str:
    async with client.messages.stream(model="m", max_tokens=99, messages=[USER]) as stream:
        return "".join([text async for text in stream.text_stream])
