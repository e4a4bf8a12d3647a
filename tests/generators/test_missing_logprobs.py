"""Streams leave out the logprobs of tokens without a text: they are found out, or such tokens are not trained on."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.client.tensors import collate
from forebay.engines.capture.checking import check
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END
from forebay.generators.base import BaseGenerator
from tests.generators.conftest import FakeBuffer

Samples = list[dict[str, Any]]
WriteRows = Callable[..., Path]


async def reward(item: dict[str, Any]) -> float:
    return 1.0


async def streamed(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    text = ""
    async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True, **params):
        text += chunk.choices[0].delta.content or ""
    return [*messages, {"role": "assistant", "content": text}], "stop"


def streamed_in_a_thread(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    stream = client.chat.completions.create(model="m", messages=messages, stream=True, **params)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    return [*messages, {"role": "assistant", "content": text}], "stop"


async def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    messages, _ = await streamed(client, messages, params)
    return await streamed(client, [*messages, {"role": "user", "content": "and?"}], params)


async def rolled_out(
    buffer: FakeBuffer, write_rows: WriteRows, rollout: Any, engine: ScriptedEngine, **params: Any
) -> Samples:
    buffer.plan["group_size"] = 1
    async with engine, asyncio.timeout(30):
        generator = BaseGenerator(engine.url, buffer.url, 1, max_attempts=1, sampling_params=params)
        await generator.run_async(write_rows({"prompt": "go"}), rollout, reward)
        for sample in buffer.samples:
            assert sample["status"] == "completed", sample
            assert (await check(engine.url, sample)).max_delta < 1e-9
    return buffer.samples


def quiet() -> ScriptedEngine:
    """It says something only to its first question, and its streams tell what SGLang's tell without parsers."""
    return ScriptedEngine(lambda call: "hm" if call.prompt == "first" else Reply(), has_parsers=False)


def assert_trainable(samples: Samples) -> None:
    """No token is trained on that has no logprob."""
    out = collate(samples, 0)
    assert not out["logprobs"].isnan().any()
    assert not (out["loss_mask"] & (out["logprobs"] == 0)).any()


@pytest.mark.parametrize("rollout", [streamed, streamed_in_a_thread])
async def test_an_answer_of_nothing_but_an_end_token_keeps_its_logprob(
    buffer: FakeBuffer, write_rows: WriteRows, rollout: Any
) -> None:
    (sample,) = await rolled_out(buffer, write_rows, rollout, quiet())
    assert (sample["tokens"][-1], sample["loss_mask"][-1]) == (TURN_END, 1)
    assert sample["logprobs"][-1] < 0
    assert_trainable([sample])


@pytest.mark.parametrize("started_with", [{"sampling_defaults": "model", "model_path": "elsewhere/model"}, {"no": 1}])
async def test_where_the_engine_does_not_tell_its_temperature_the_end_token_is_not_trained_on(
    buffer: FakeBuffer, write_rows: WriteRows, started_with: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The turn before it keeps its logprobs, and is trained on."""
    engine = ScriptedEngine(lambda call: "hm" if call.prompt == "go" else Reply(), has_parsers=False)
    engine.started_with.update({"sampling_defaults": None} | started_with)
    with caplog.at_level(logging.WARNING):
        (sample,) = await rolled_out(buffer, write_rows, two_turns, engine)
    first, second = [span for span in sample["token_spans"] if span["source"] == "llm"]
    assert sample["loss_mask"][first["start"] : first["end"]] == [1] * 3
    assert all(value < 0 for value in sample["logprobs"][first["start"] : first["end"]])
    assert sample["loss_mask"][second["start"] : second["end"]] == [0]
    assert sample["extra_info"]["capture"]["unscored_tokens"] == 1
    assert_trainable([sample])
    assert "have no logprobs" in caplog.text


async def test_an_end_token_that_is_all_there_is_and_not_known_leaves_nothing_to_train_on(
    buffer: FakeBuffer, write_rows: WriteRows
) -> None:
    (sample,) = await rolled_out(buffer, write_rows, streamed, quiet(), temperature=0.5)
    assert not any(sample["loss_mask"])
    assert sample["logprobs"] == [0.0] * len(sample["tokens"])
    assert_trainable([sample])
