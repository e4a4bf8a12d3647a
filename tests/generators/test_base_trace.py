"""What a sample says about the tokens and the weights behind it, as far as the engine's replies tell."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from forebay.generators.base import BaseGenerator, query_single_turn, single_turn
from forebay.web.serving import serve_app

ASKED = {"logprobs": True, "return_token_ids": True, "max_tokens": 8}


@asynccontextmanager
async def engine_that_tells(*replies: dict[str, Any]) -> AsyncIterator[str]:
    """An engine that gives these replies, one after the other; its address."""
    left = list(replies)

    async def chat(request: Request) -> JSONResponse:
        assert (await request.json())["return_token_ids"] is True
        return JSONResponse(left.pop(0))

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "telling", "object": "model"}]})

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
    async with serve_app(Starlette(routes=routes)) as port:
        yield f"http://127.0.0.1:{port}"


def reply(
    prompt: Sequence[int] | None = (1, 2), response: Sequence[int] = (3, 4), logprobs: int = 2, **metadata: Any
) -> dict[str, Any]:
    """A chat completion of SGLang's shape, with logprobs of -0.5 for the first tokens of the response."""
    content = [{"token": "x", "logprob": -0.5, "bytes": [], "top_logprobs": []} for _ in range(logprobs)]
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    choice["logprobs"] = {"content": content}
    if prompt is not None:
        choice |= {"prompt_token_ids": list(prompt), "response_token_ids": list(response)}
    head = {"id": "1", "object": "chat.completion", "created": 1, "model": "telling"}
    return {**head, "choices": [choice], "metadata": metadata}


async def all_samples(buffer: Any, write_rows: Any, rollout: Any, *replies: dict[str, Any]) -> list[dict[str, Any]]:
    buffer.plan["group_size"] = 1

    async def reward(item: dict[str, Any]) -> float:
        return 1.0

    async with engine_that_tells(*replies) as url, asyncio.timeout(30):
        generator = BaseGenerator(url, buffer.url, 1, sampling_params=ASKED, max_attempts=1)
        await generator.run_async(write_rows({"prompt": "go"}), rollout, reward)
    samples: list[dict[str, Any]] = buffer.samples
    assert [sample["status"] for sample in samples] == ["completed"] * len(samples), samples
    return samples


async def one_sample(buffer: Any, write_rows: Any, rollout: Any, *replies: dict[str, Any]) -> dict[str, Any]:
    (sample,) = await all_samples(buffer, write_rows, rollout, *replies)
    return sample


async def two_turns(client: Any, messages: list[dict[str, Any]], params: dict[str, Any]) -> Any:
    messages, _ = await single_turn(client, messages, params)
    return await single_turn(client, [*messages, {"role": "user", "content": "again"}], params)


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_one_call_gives_its_tokens_and_its_weight_version(buffer, write_rows, rollout: Any) -> None:
    spans = [{"version": "7", "start": 0, "end": 2}]
    told = reply(weight_version="7", weight_versions=spans)
    sample = await one_sample(buffer, write_rows, rollout, told)
    assert sample["weight_version"] == 7
    assert "weight_versions" not in sample
    assert (sample["tokens"], sample["loss_mask"]) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert sample["logprobs"] == [0.0, 0.0, -0.5, -0.5]


async def test_several_calls_give_one_sequence_and_every_version_once(buffer, write_rows) -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 2}]
    second = reply([1, 2, 3, 4, 5, 6], [7, 8], weight_version="9", weight_versions=spans)
    sample = await one_sample(buffer, write_rows, two_turns, reply(weight_version=8), second)
    assert sample["weight_versions"] == [8, 7, 9]
    assert "weight_version" not in sample
    assert sample["tokens"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample["loss_mask"] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sample["logprobs"] == [0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]


@pytest.mark.parametrize("prompt", [[1, 2, 9, 5, 6], [1, 2]], ids=["another history", "the same prompt"])
async def test_a_call_that_does_not_go_on_gives_a_sample_of_its_own(buffer, write_rows, prompt: list[int]) -> None:
    second = reply(prompt, [7, 8], weight_version="2")
    fork, main = await all_samples(buffer, write_rows, two_turns, reply(weight_version="1"), second)
    assert (fork["tokens"], fork["weight_version"]) == ([1, 2, 3, 4], 1)
    assert (main["tokens"], main["weight_version"]) == ([*prompt, 7, 8], 2)
    assert fork["rollout_id"] == main["rollout_id"]


async def test_two_choices_give_two_samples(buffer, write_rows) -> None:
    whole = reply()
    whole["choices"] = [whole["choices"][0] | {"index": 0}, reply(response=[5, 6])["choices"][0] | {"index": 1}]
    samples = await all_samples(buffer, write_rows, single_turn, whole)
    assert [sample["tokens"] for sample in samples] == [[1, 2, 3, 4], [1, 2, 5, 6]]


async def test_a_call_without_ids_leaves_no_tokens_at_all(buffer, write_rows) -> None:
    second = reply(None, weight_version="2")
    sample = await one_sample(buffer, write_rows, two_turns, reply(weight_version="1"), second)
    assert sample["weight_versions"] == [1, 2]
    assert sample["retokenized"] is True
    assert not {"tokens", "loss_mask", "logprobs"} & sample.keys()


async def test_a_version_that_is_no_number_is_left_out(buffer, write_rows) -> None:
    sample = await one_sample(buffer, write_rows, two_turns, reply(weight_version="default"), reply([1, 2, 3, 4, 5]))
    assert not {"weight_version", "weight_versions"} & sample.keys()


async def test_tokens_without_all_their_logprobs_go_without_any(buffer, write_rows) -> None:
    sample = await one_sample(buffer, write_rows, single_turn, reply(logprobs=1))
    assert sample["tokens"] == [1, 2, 3, 4]
    assert "logprobs" not in sample
