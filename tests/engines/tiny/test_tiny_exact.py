"""What the engine told of its tokens is what it tells when they are fed back to it."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from forebay.engines.tiny.recipe import question

LIMIT_S = 60.0
CLOSE = 1e-4
TALK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": question(3, 5)}]}
TOLD: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "return_meta_info": True}
LONG: dict[str, Any] = {"max_tokens": 7_000, "ignore_eos": True, **TOLD}
"""So long that whoever looks at it now and then finds it under way."""


@pytest.fixture
async def http(own_engine_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an engine that runs, with the weights that it was started with."""
    async with httpx.AsyncClient(base_url=own_engine_url, timeout=LIMIT_S) as http:
        yield http


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json() if reply.content else None


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    whole = await post(http, "/v1/chat/completions", **TALK | fields)
    choice: dict[str, Any] = whole["choices"][0]
    return choice


async def num_running(http: httpx.AsyncClient) -> int:
    (load,) = (await http.get("/v1/loads")).json()["loads"]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


async def wait_tokens(http: httpx.AsyncClient, num_tokens: int) -> None:
    """Return once the cache holds so many tokens."""
    async with asyncio.timeout(LIMIT_S):
        while (await http.get("/v1/loads")).json()["loads"][0]["num_used_tokens"] < num_tokens:  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.01)


async def scores(http: httpx.AsyncClient, tokens: list[int]) -> list[float | None]:
    """What the engine says to these tokens now."""
    told = await post(
        http,
        "/generate",
        input_ids=tokens,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert [token for _, token, _ in told["meta_info"]["input_token_logprobs"]] == tokens
    return [logprob for logprob, _, _ in told["meta_info"]["input_token_logprobs"]]


def told(choice: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """The prompt, what was sampled, and its logprobs."""
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return choice["prompt_token_ids"], choice["response_token_ids"], logprobs


async def differences(
    http: httpx.AsyncClient, choice: dict[str, Any], start: int = 0, end: int | None = None
) -> list[float]:
    """Between the logprobs told for the sampled tokens from ``start`` to ``end`` and those of now."""
    prompt, sampled, logprobs = told(choice)
    now = (await scores(http, prompt + sampled))[len(prompt) :]
    pairs = list(zip(logprobs, now, strict=True))[start:end]
    assert pairs
    return [abs(then - (after or 0.0)) for then, after in pairs]


async def test_aborted_at_any_moment_and_continued_leaves_no_gap(http: httpx.AsyncClient) -> None:
    moments = random.Random(3)
    for number in range(5):
        call = asyncio.create_task(chat(http, **LONG, rid=f"cut-{number}"))
        await wait_tokens(http, moments.randrange(35, 120))
        await post(http, "/abort_request", rid=f"cut-{number}")
        first = await call
        prompt, sampled, logprobs = told(first)
        assert (first["finish_reason"], len(sampled)) == ("abort", first["meta_info"]["completion_tokens"])
        rest = await chat(http, **LONG | {"max_tokens": 5}, input_ids=prompt + sampled)
        now = (await scores(http, prompt + sampled + rest["response_token_ids"]))[len(prompt) :]
        assert now == pytest.approx(logprobs + told(rest)[2], abs=CLOSE)
    assert await num_running(http) == 0


async def test_a_pause_that_aborts_leaves_the_engine_idle_and_new_calls_waiting(http: httpx.AsyncClient) -> None:
    call = asyncio.create_task(chat(http, **LONG | {"max_tokens": 3000}))
    await wait_tokens(http, 40)
    await post(http, "/pause_generation", mode="abort")
    assert (await call)["finish_reason"] == "abort"
    assert await num_running(http) == 0
    late = asyncio.create_task(chat(http, **TOLD, rid="late", max_tokens=3, ignore_eos=True))
    await post(http, "/abort_request", rid="late")
    assert await num_running(http) == 0
    assert not late.done()
    await post(http, "/continue_generation")
    assert (await late)["finish_reason"] == "length"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_calls_aborted_in_a_pause_keep_their_tokens(http: httpx.AsyncClient, mode: str) -> None:
    call = asyncio.create_task(chat(http, **LONG | {"max_tokens": 3000}, rid="held"))
    await wait_tokens(http, 40)
    await post(http, "/pause_generation", mode=mode)
    await post(http, "/abort_request", rid="held")
    done, _ = await asyncio.wait({call}, timeout=LIMIT_S if mode == "retract" else 0.1)
    assert bool(done) == (mode == "retract"), "in place it stands until generation goes on"
    await post(http, "/continue_generation")
    choice = await call
    assert choice["finish_reason"] == "abort"
    assert max(await differences(http, choice)) < CLOSE
    assert await num_running(http) == 0
