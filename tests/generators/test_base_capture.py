"""What the base generator records of rollout functions that ask for nothing but an answer."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from forebay.core.parts import Rows
from forebay.engines.capture.checking import check
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, decode, encode, encode_chat
from forebay.generators.base import BaseGenerator, query_single_turn, single_turn
from tests.kit import TIME_LIMIT_S

Samples = list[dict[str, Any]]


async def reward(item: dict[str, Any]) -> float:
    return 1.0


async def rolled_out(buffer: Any, write_rows: Any, script: Any, rollout: Any, **options: Any) -> Samples:
    """The samples of one rollout: forks first, the main one last. Each was checked against the engine."""
    buffer.plan["group_size"] = 1
    async with ScriptedEngine(script) as engine, asyncio.timeout(30):
        generator = BaseGenerator(engine.url, buffer.url, 1, max_attempts=1, **options)
        await generator.run_async(write_rows({"prompt": "go"}), rollout, reward)
        for sample in buffer.samples:
            assert sample["status"] == "completed", sample
            if "tokens" in sample:
                assert (await check(engine.url, sample)).max_delta < 1e-9
    samples: Samples = buffer.samples
    return samples


def trained(sample: dict[str, Any]) -> str:
    return decode(token for token, bit in zip(sample["tokens"], sample["loss_mask"], strict=True) if bit)


async def plain(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    reply = await client.chat.completions.create(model=client.rollout.model, messages=messages)
    assert reply.choices[0].message.content == "an answer"
    return [*messages, reply.choices[0].message], "stop"


def plain_in_a_thread(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    reply = client.chat.completions.create(model=client.rollout.model, messages=messages)
    return [*messages, reply.choices[0].message], "stop"


async def raw(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """As LangChain asks."""
    reply = await client.chat.completions.with_raw_response.create(model=client.rollout.model, messages=messages)
    return [*messages, reply.parse().choices[0].message], "stop"


async def streamed(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    text = ""
    async for chunk in await client.chat.completions.create(model="scripted", messages=messages, stream=True):
        assert chunk.usage is None
        text += chunk.choices[0].delta.content or ""
    return [*messages, {"role": "assistant", "content": text}], "stop"


def streamed_in_a_thread(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    stream = client.chat.completions.create(model="scripted", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    return [*messages, {"role": "assistant", "content": text}], "stop"


async def streamed_raw(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    ask = client.chat.completions.with_raw_response.create
    reply = await ask(model="scripted", messages=messages, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply.parse()])
    return [*messages, {"role": "assistant", "content": text}], "stop"


ROLLOUTS = [plain, plain_in_a_thread, raw, streamed, streamed_in_a_thread, streamed_raw, single_turn, query_single_turn]


@pytest.mark.parametrize("rollout", ROLLOUTS)
async def test_tokens_are_recorded_though_nobody_asked(buffer, write_rows, rollout: Any) -> None:
    (sample,) = await rolled_out(buffer, write_rows, lambda _: "an answer", rollout)
    prompt = encode_chat([{"role": "user", "content": "go"}])
    assert sample["tokens"] == [*prompt, *encode("an answer"), TURN_END]
    assert sample["loss_mask"] == [0] * len(prompt) + [1] * (len(sample["tokens"]) - len(prompt))
    assert sample["messages"][-1]["content"] == "an answer"
    assert sample["extra_info"]["capture"] == {"clean": 1}
    assert [span["source"] for span in sample["token_spans"]] == ["environment", "llm"]


async def weather(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """Two turns with a tool between them."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    ask = client.chat.completions.create
    reply = await ask(model="scripted", messages=messages, tools=tools)
    (call,) = reply.choices[0].message.tool_calls
    messages = [*messages, reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    reply = await ask(model="scripted", messages=messages, tools=tools)
    return [*messages, reply.choices[0].message], "stop"


def calling(arguments: str) -> Any:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return lambda asked: Reply(tool_calls=[call]) if asked.messages[-1]["role"] == "user" else "sunny it is"


async def test_a_call_of_a_tool_and_its_result_are_one_sequence(buffer, write_rows) -> None:
    (sample,) = await rolled_out(buffer, write_rows, calling('{"city": "Ulm"}'), weather)
    assert [span["source"] for span in sample["token_spans"]] == ["environment", "llm", "tool", "llm"]
    assert trained(sample).endswith("</tool_call>sunny it is")
    assert "sunny" not in trained(sample).removesuffix("sunny it is")
    assert sample["extra_info"]["capture"] == {"clean": 2}


async def test_arguments_that_the_template_spells_otherwise_are_realigned(buffer, write_rows) -> None:
    (sample,) = await rolled_out(buffer, write_rows, calling('{"city":"Ulm"}'), weather)
    told = sample["extra_info"]["capture"]
    assert (told["clean"], told["realigned"]) == (1, 1)
    assert told["realigned_tokens"] == len(encode('"Ulm"}}\n</tool_call>')) + 1
    assert trained(sample) == '<tool_call>\n{"name": "weather", "arguments": {"city":sunny it is'


async def test_reasoning_that_the_template_drops_is_a_fork_with_the_same_reward(buffer, write_rows) -> None:
    async def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        messages, _ = await single_turn(client, messages, params)
        return await single_turn(client, [*messages, {"role": "user", "content": "more"}], params)

    script = lambda asked: Reply(text=f"answer {len(asked.messages)}", reasoning="a thought")  # noqa: E731 - short
    fork, main = await rolled_out(buffer, write_rows, script, two_turns)
    assert (fork["fork"], main.get("fork", 0), fork["rollout_id"]) == (1, 0, main["rollout_id"])
    assert trained(fork).endswith("answer 1")
    assert trained(main).endswith("answer 3")
    assert main["extra_info"]["capture"] == {"clean": 1, "forked": 1}


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left open"])
async def test_a_stream_that_is_not_read_to_its_end_is_recorded_as_far_as_it_was_read(
    buffer, write_rows, is_closed: bool
) -> None:
    async def impatient(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        stream = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if "two" in text:
                break
        if is_closed:
            await stream.close()
        return [*messages, {"role": "assistant", "content": text}], "stop"

    script = lambda _: Reply(text="one two " + "three " * 1000, tokens_per_s=400)  # noqa: E731 - short
    (sample,) = await rolled_out(buffer, write_rows, script, impatient)
    assert trained(sample) == sample["messages"][-1]["content"]
    assert len(trained(sample)) < 1000
    assert sample["extra_info"]["capture"] == {"clean": 1}


async def test_turns_whose_streams_are_left_open_are_one_sequence(buffer, write_rows) -> None:
    async def impatient(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        for question in ("one?", "two?", "three?"):
            messages = [*messages, {"role": "user", "content": question}]
            stream = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if len(text) >= 3:
                    break
            messages = [*messages, {"role": "assistant", "content": text}]
        return messages, "stop"

    script = lambda call: Reply(text=f"{len(call.messages)} and " + "more " * 1000, tokens_per_s=400)  # noqa: E731 - short
    (sample,) = await rolled_out(buffer, write_rows, script, impatient)
    said = [message["content"] for message in sample["messages"] if message["role"] == "assistant"]
    assert trained(sample) == "".join(said)
    assert sample["extra_info"]["capture"] == {"clean": 3}


async def test_a_stream_left_in_a_thread_is_recorded_as_far_as_it_was_read(buffer, write_rows) -> None:
    def impatient(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        with client.chat.completions.create(model="scripted", messages=messages, stream=True) as stream:
            text = next(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
        return [*messages, {"role": "assistant", "content": text}], "stop"

    script = lambda _: Reply(text="one two " + "three " * 1000, tokens_per_s=400)  # noqa: E731 - short
    (sample,) = await rolled_out(buffer, write_rows, script, impatient)
    assert trained(sample) == sample["messages"][-1]["content"]


async def test_a_stream_of_a_rollout_that_fails_is_stopped_at_its_engine(buffer, write_rows) -> None:
    async def failing(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        stream = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
        async for _ in stream:
            kept.append(stream)
            raise ValueError("no more")

    kept: list[Any] = []
    buffer.plan["group_size"] = 1
    async with ScriptedEngine(lambda _: Reply(text="one", hang=True)) as engine, asyncio.timeout(30):
        generator = BaseGenerator(engine.url, buffer.url, 1, max_attempts=1)
        await generator.run_async(write_rows({"prompt": "go"}), failing, reward)
        await engine.wait_in_flight(0)
        assert engine.calls[0].finished == "abort"
    assert buffer.samples[0]["outcome"] == "agent_failure"


async def test_a_stream_tells_what_was_asked_for(buffer, write_rows) -> None:
    async def curious(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        options = {"include_usage": True}
        ask = client.chat.completions.create
        stream = await ask(model="scripted", messages=messages, stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3]
        assert not chunks[-1].choices
        assert not any(getattr(chunk, "sglext", None) for chunk in chunks)
        return [*messages, {"role": "assistant", "content": "ab"}], "stop"

    (sample,) = await rolled_out(buffer, write_rows, lambda _: "ab", curious)
    assert sum(sample["loss_mask"]) == 3


async def test_new_weights_in_the_middle_are_told_by_span(buffer, write_rows) -> None:
    engines: list[ScriptedEngine] = []

    async def script(asked: ScriptedCall) -> Reply:
        return Reply(text="a" * 40, tokens_per_s=8)

    async def updated(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        answering = asyncio.create_task(single_turn(client, messages, params))
        async with httpx.AsyncClient(base_url=client.rollout.engine_url, timeout=TIME_LIMIT_S) as http:
            await engines[0].wait_in_flight(1)
            while not engines[0].calls[0].sampled_ids:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.005)
            await http.post("/pause_generation", json={"mode": "in_place"})
            await http.post("/update_weights_from_disk", json={"model_path": "x", "weight_version": "8"})
            await http.post("/continue_generation", json={})
        return await answering

    buffer.plan["group_size"] = 1
    async with ScriptedEngine(script) as engine, asyncio.timeout(30):
        engines.append(engine)
        async with httpx.AsyncClient(base_url=engine.url, timeout=TIME_LIMIT_S) as http:
            await http.post("/update_weights_from_disk", json={"model_path": "x", "weight_version": "7"})
        generator = BaseGenerator(engine.url, buffer.url, 1, max_attempts=1)
        await generator.run_async(write_rows({"prompt": "go"}), updated, reward)
    (sample,) = buffer.samples
    assert sample["weight_versions"] == [7, 8]
    first, second = [span for span in sample["token_spans"] if span["source"] == "llm"]
    assert (first["weight_version"], second["weight_version"]) == (7, 8)
    assert first["mixed_kv"]
    assert second["mixed_kv"]


def own_rows(num_rows: int) -> Any:
    return lambda sample: {"mine": Rows(np.arange(num_rows), [(0, len(sample["tokens"]) - 1)])}


@pytest.mark.parametrize("made", [lambda _: None, lambda _: ["mine"], lambda _: {"mine": np.zeros(3)}, own_rows(1)])
async def test_a_sample_is_sent_without_arrays_of_its_author_that_the_server_would_refuse(
    buffer: Any, write_rows: Any, made: Any
) -> None:
    async def sample_arrays(sample: Any) -> Any:
        return made(sample)

    (sample,) = await rolled_out(buffer, write_rows, lambda _: "an answer", plain, sample_arrays=sample_arrays)
    assert not sample.get("arrays")


async def test_a_generator_adds_arrays_of_its_own(buffer: Any, write_rows: Any) -> None:
    async def sample_arrays(sample: Any) -> Any:
        return own_rows(len(sample["tokens"]) - 1)(sample)

    (sample,) = await rolled_out(buffer, write_rows, lambda _: "an answer", plain, sample_arrays=sample_arrays)
    num_tokens = len(sample["tokens"])
    assert sample["arrays"]["mine"] == {"dtype": "I64", "shape": [], "rows": [[0, 0, 0, num_tokens - 1]]}


async def test_capture_can_be_switched_off(buffer, write_rows) -> None:
    bodies: list[dict[str, Any]] = []

    def script(asked: ScriptedCall) -> str:
        bodies.append(asked.body)
        return "an answer"

    (sample,) = await rolled_out(buffer, write_rows, script, plain, capture=False)
    assert not {"return_token_ids", "logprobs"} & bodies[0].keys()
    assert sample["retokenized"] is True
    assert not {"tokens", "token_spans"} & sample.keys()


async def test_all_turns_of_a_rollout_go_to_one_engine(buffer, write_rows) -> None:
    urls: list[set[str]] = []

    async def talk(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        for _ in range(3):
            messages, reason = await single_turn(client, messages, params)
            messages = [*messages, {"role": "user", "content": "again"}]
        urls.append({turn.engine_url for turn in client.rollout.recorded.turns()})
        return messages, reason

    buffer.plan["group_size"] = 6
    async with ScriptedEngine(lambda _: "x") as one, ScriptedEngine(lambda _: "x") as two, asyncio.timeout(30):
        generator = BaseGenerator([one.url, two.url], buffer.url, 6, max_attempts=1)
        await generator.run_async(write_rows({"prompt": "go"}), talk, reward)
    assert [len(own) for own in urls] == [1] * 6
    assert set.union(*urls) == {one.url, two.url}
