"""Runs behind a router whose workers cannot be sent chats: with the model's tokenizer their samples are exact."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.core.ids import group_id
from forebay.engines.capture.checking import check
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, encode
from forebay.generators.base import BaseGenerator, query_single_turn, single_turn
from tests.engines.template_kit import HidingRouter, hiding_router, write_tokenizer
from tests.generators.partial_kit import PROMPT, PROMPT_IDS, check_tokens, saying
from tests.kit import TIME_LIMIT_S

UNREACHABLE = {"url": "http://127.0.0.1:1"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def template_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


async def reward(item: dict[str, Any]) -> float:
    return 1.0


class Behind:
    """An engine behind a router that hides it, and a generator that knows the model's tokenizer."""

    def __init__(self, engine: ScriptedEngine, router: HidingRouter, generator: BaseGenerator, rows: Path) -> None:
        self.engine = engine
        self.router = router
        self.generator = generator
        self._rows = rows

    async def run(self, rollout: Any) -> None:
        async with asyncio.timeout(30):
            await self.generator.run_async(self._rows, rollout, reward)


@pytest.fixture
def behind(buffer, write_rows, template_path: Path) -> Any:
    """A factory: ``async with behind(script, **listed)``."""

    @asynccontextmanager
    async def serve(script: Any, listed: dict[str, Any] = UNREACHABLE, **options: Any) -> AsyncIterator[Behind]:
        buffer.plan["group_size"] = 1
        rows = write_rows({"instance_id": "a", "prompt": "a"})
        async with ScriptedEngine(script) as engine, hiding_router(engine.url, **listed) as (router, url):
            options = {"max_tokens": 64, "max_attempts": 1, "template_path": template_path, **options}
            yield Behind(engine, router, BaseGenerator(url, buffer.url, 1, **options), rows)

    return serve


async def own_call(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """It asks for logprobs, and sees them."""
    reply = await client.chat.completions.create(model="m", messages=messages, logprobs=True, **params)
    (choice,) = reply.choices
    assert "".join(token.token for token in choice.logprobs.content) == "one two three<|im_end|>"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT_IDS), 14)
    return [*messages, choice.message], choice.finish_reason


async def parsed_by_hand(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """As LangChain asks."""
    reply = await client.chat.completions.with_raw_response.create(model="m", messages=messages, **params)
    assert reply.parse().choices[0].logprobs is None
    return [*messages, reply.parse().choices[0].message], "stop"


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn, own_call, parsed_by_hand])
@pytest.mark.parametrize("listed", [UNREACHABLE, {"connection_mode": "grpc"}], ids=["unreachable", "grpc"])
async def test_samples_are_exact_though_no_worker_can_be_asked(
    behind, buffer, rollout: Any, listed: dict[str, Any]
) -> None:
    async with behind(lambda _: "one two three", listed) as served:
        await served.run(rollout)
        (sample,) = buffer.samples
        assert served.router.asked == ["/generate"]
        assert sample["status"] == "completed", sample
        check_tokens(sample, [*encode("one two three"), TURN_END])
        assert "retokenized" not in sample
        assert sample["messages"] == [*PROMPT, {"role": "assistant", "content": "one two three"}]
        assert (await check(served.engine.url, sample)).max_delta < 1e-9


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_an_aborted_turn_goes_on_from_its_tokens(behind, buffer, rollout: Any) -> None:
    async with behind(saying("née two", [2, 5])) as served:
        await served.run(rollout)
    (sample,) = buffer.samples
    check_tokens(sample, [*encode("née two"), TURN_END])
    bodies = [call.body for call in served.engine.calls]
    assert [body["input_ids"][len(PROMPT_IDS) :] for body in bodies] == [[], encode("né")[:2], encode("née ")]
    assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [64, 62, 59]
    assert sample["messages"][-1]["content"] == "née two", "a character across a cut is read from all tokens"
    assert sample["extra_info"]["capture"] == {"clean": 1, "merged": 2}


async def test_a_stop_string_across_a_cut_ends_the_turn(behind, buffer) -> None:
    async with behind(saying("one two three", [6]), sampling_params={"stop": "two", "max_tokens": 64}) as served:
        await served.run(single_turn)
    (sample,) = buffer.samples
    check_tokens(sample, encode("one two"))
    assert sample["messages"][-1]["content"] == "one "
    assert sample["extra_info"]["finish_reason"] == "stop"


async def test_two_turns_are_one_sequence(behind, buffer) -> None:
    async def talk(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        messages, _ = await single_turn(client, messages, params)
        return await single_turn(client, [*messages, {"role": "user", "content": "more"}], params)

    async with behind(lambda call: f"answer {len(call.messages)}") as served:
        await served.run(talk)
        (sample,) = buffer.samples
        assert (await check(served.engine.url, sample)).num_tokens == 2 * (len("answer 1") + 1)
    assert sample["extra_info"]["capture"] == {"clean": 2}


async def test_choices_are_samples_of_their_own(behind, buffer) -> None:
    async def twice(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        reply = await client.chat.completions.create(model="m", messages=messages, n=2, **params)
        return [*messages, reply.choices[1].message], "stop"

    async with behind(lambda call: f"answer {call.choice}") as served:
        await served.run(twice)
    assert sorted(sample["messages"][-1]["content"] for sample in buffer.samples) == ["answer 0", "answer 1"]
    assert all("tokens" in sample for sample in buffer.samples)


async def test_a_chat_with_tools_goes_on_as_one_without_token_ids(behind, buffer) -> None:
    async def with_tools(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        return await single_turn(client, messages, params, TOOLS)

    async with behind(lambda _: "an answer") as served:
        await served.run(with_tools)
    (sample,) = buffer.samples
    assert served.router.asked == ["/v1/chat/completions"]
    assert sample["retokenized"] is True
    assert sample["extra_info"]["capture"] == {"untold": 1}


async def test_weight_versions_are_told(behind, buffer) -> None:
    async with behind(lambda _: "x") as served:
        async with httpx.AsyncClient(timeout=TIME_LIMIT_S) as http:
            await http.post(f"{served.engine.url}/update_weight_version", json={"new_version": "7"})
        await served.run(single_turn)
    assert buffer.samples[0]["weight_version"] == 7


@pytest.mark.parametrize(
    ("started_with", "expected"),
    [
        ({"sampling_defaults": "model"}, {"top_p": 0.9}),  # what chats would get of the model, /generate does not
        (
            {"preferred_sampling_params": {"temperature": 0.6, "top_p": 0.5, "min_new_tokens": 2}},
            {"temperature": 0.6, "top_p": 0.9, "min_tokens": 2},
        ),
    ],
)
async def test_spans_say_how_a_chat_over_generate_was_sampled(
    behind, buffer, started_with: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with behind(lambda _: "x", sampling_params={"top_p": 0.9, "max_tokens": 64}) as served:
        served.engine.started_with.update(started_with)
        await served.run(single_turn)
    assert served.router.asked == ["/generate"]
    assert buffer.samples[0]["token_spans"][-1]["sampling"] == expected


async def test_an_error_of_the_engine_is_the_rollouts(behind, buffer) -> None:
    async with behind(lambda _: Reply(text="too long", error_status=400)) as served:
        await served.run(single_turn)
    (sample,) = buffer.samples
    assert sample["status"] == "failed"
    assert "too long" in sample["error"]["message"]


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_calls_of_a_closed_group_are_ended_at_a_decode_worker(behind, buffer, rollout: Any) -> None:
    async with behind(lambda _: Reply(text="one", hang=True), {"worker_type": "decode"}) as served:
        running = asyncio.create_task(served.run(rollout))
        await served.engine.wait_in_flight(1)
        buffer.close_group(group_id("a", 0))
        await served.engine.wait_in_flight(0)
        await running
        assert served.engine.calls[0].finished == "abort"
    assert served.router.asked == ["/generate"]
    assert buffer.samples == []


async def test_a_router_that_is_away_is_waited_for(behind, buffer) -> None:
    async with behind(lambda _: "one") as served:
        served.engine.available = False
        running = asyncio.create_task(served.run(single_turn))
        await buffer.wait_for(lambda: buffer.progress and buffer.progress[-1].get("waiting_for_engine"))
        served.engine.available = True
        await running
    (sample,) = buffer.samples
    check_tokens(sample, [*encode("one"), TURN_END])
