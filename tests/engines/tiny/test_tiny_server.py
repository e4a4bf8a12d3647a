"""A real engine process, asked over a socket with the official client."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forebay.engines.tiny.recipe import answer, question
from forebay.generators.base import BaseGenerator

LIMIT_S = 60.0
FREED_WITHIN_S = 10.0
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
"""A call that takes longer than any limit here."""

NumRunning = Callable[[], Awaitable[int]]
StartEngine = Callable[..., AbstractContextManager[tuple[subprocess.Popen[bytes], str]]]


def ask(text: str = question(3, 5), **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 20, **fields}


def ask_endlessly(rid: str, **fields: Any) -> dict[str, Any]:
    return ask(rid=rid) | ENDLESS | fields


async def eventually(condition: Callable[[], Awaitable[bool]], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 -- the condition is in another process, which sends no event
            await asyncio.sleep(0.02)


async def is_busy(num_running: NumRunning, count: int) -> None:
    async def reached() -> bool:
        return await num_running() == count

    await eventually(reached)


async def is_idle(num_running: NumRunning) -> None:
    async def reached() -> bool:
        return await num_running() == 0

    await eventually(reached, FREED_WITHIN_S)


def events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_fifth_of_the_sampled_answers_is_right_at_least(client: openai.AsyncOpenAI) -> None:
    sums = [(left, right) for left in range(10) for right in range(10)]
    replies = await asyncio.gather(
        *(client.chat.completions.create(**ask(question(*pair), n=4, seed=0, temperature=1.0)) for pair in sums)
    )
    right = [
        choice.message.content == answer(sum(pair))
        for pair, reply in zip(sums, replies, strict=True)
        for choice in reply.choices
    ]
    assert 0.2 <= sum(right) / len(right) < 0.8


async def test_logprobs_cover_every_token_and_exclude_no_likelier_one(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(**ask(logprobs=True, top_logprobs=3, temperature=0))
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert reply.usage is not None
    assert len(logprobs.content) == reply.usage.completion_tokens
    assert "".join(token.token for token in logprobs.content[:-1]) == reply.choices[0].message.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-6)
        assert token.logprob <= 0


async def test_the_logprobs_of_an_answer_sum_to_how_often_it_comes(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(**ask(logprobs=True, n=64, seed=0))
    told: dict[str, float] = {}
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        told[choice.message.content or ""] = sum(token.logprob for token in choice.logprobs.content)
    commonest = max(told, key=lambda text: told[text])
    share = sum(choice.message.content == commonest for choice in reply.choices) / 64
    assert share == pytest.approx(2.718281828 ** told[commonest], abs=0.25)


async def test_a_seed_repeats_the_answers_and_another_changes_them(client: openai.AsyncOpenAI) -> None:
    async def texts(seed: int) -> list[str | None]:
        reply = await client.chat.completions.create(**ask(n=4, seed=seed, temperature=3.0))
        return [choice.message.content for choice in reply.choices]

    assert await texts(1) == await texts(1) != await texts(2)


async def test_a_stop_string_ends_the_text_before_it(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/v1/chat/completions", json=ask(stop=["}", "nothing"], temperature=0))).json()
    (choice,) = reply["choices"]
    assert choice["message"]["content"].startswith("\\boxed{")
    assert "}" not in choice["message"]["content"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "}")


async def test_a_final_message_is_continued(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": question(3, 5)}, {"role": "assistant", "content": "\\boxed{"}]
    body = ask(messages=messages, temperature=0) | {"messages": messages}
    reply = await client.chat.completions.create(**body, extra_body={"continue_final_message": True})
    whole = await client.chat.completions.create(**ask(temperature=0))
    assert "\\boxed{" + (reply.choices[0].message.content or "") == whole.choices[0].message.content


async def test_a_stream_tells_what_the_whole_reply_tells(client: openai.AsyncOpenAI) -> None:
    fields = ask(n=3, seed=4, temperature=2.0, logprobs=True)
    whole = await client.chat.completions.create(**fields)
    texts, reasons, num_tokens, usage = ["", "", ""], ["", "", ""], 0, None
    async for chunk in await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs is not None:
                num_tokens += len(choice.logprobs.content or [])
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert usage is not None
    assert num_tokens == usage.completion_tokens


async def test_an_abort_by_prefix_answers_with_the_partial_text(
    http: httpx.AsyncClient, num_running: NumRunning
) -> None:
    calls = [
        asyncio.create_task(http.post("/v1/chat/completions", json=ask_endlessly(rid, n=2)))
        for rid in ("run1-a", "run1-b")
    ]
    await is_busy(num_running, 4)
    assert (await http.post("/abort_request", json={"rid": "run2"})).status_code == 200
    assert await num_running() == 4
    assert (await http.post("/abort_request", json={"rid": "run1"})).status_code == 200
    await is_idle(num_running)
    for reply in await asyncio.gather(*calls):
        assert reply.status_code == 200
        assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["abort", "abort"]


async def test_abort_all_ends_streams_with_what_they_told(http: httpx.AsyncClient, num_running: NumRunning) -> None:
    call = asyncio.create_task(http.post("/v1/chat/completions", json=ask_endlessly("s", stream=True)))
    await is_busy(num_running, 1)
    await http.post("/abort_request", json={"abort_all": True})
    last = events((await call).text)[-1]
    assert last["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_rows(engine_url: str, num_running: NumRunning, stream: bool) -> None:
    async with httpx.AsyncClient(base_url=engine_url, timeout=LIMIT_S) as leaving:
        body = ask_endlessly("leaving", n=3, stream=stream)
        call = asyncio.create_task(leaving.post("/v1/chat/completions", json=body))
        await is_busy(num_running, 3)
        call.cancel()
    await is_idle(num_running)


async def test_a_prompt_beyond_the_context_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context of this model is 8192 tokens") as told:
        await client.chat.completions.create(**ask("0" * 10_000))
    assert told.value.param == "messages"


async def test_an_answer_may_be_as_long_as_a_run_allows_by_default(client: openai.AsyncOpenAI) -> None:
    generator = BaseGenerator("http://engine", "http://buffer")
    reply = await client.chat.completions.create(**ask(max_tokens=generator.max_tokens))
    assert reply.choices[0].finish_reason == "stop"


async def test_more_tokens_than_the_context_holds_are_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="and 8192 to generate") as told:
        await client.chat.completions.create(**ask(max_tokens=8192))
    assert told.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"input_ids": [0, 99_999]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
async def test_a_wrong_field_is_named(http: httpx.AsyncClient, fields: dict[str, Any], field: str) -> None:
    reply = await http.post("/v1/chat/completions", json=ask() | fields)
    assert reply.status_code == 400
    error = reply.json()
    assert (error["object"], error["type"], error["code"]) == ("error", "BadRequestError", 400)
    assert field in f"{error['param']} {error['message']}"


async def test_what_is_not_json_is_refused(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "JSON" in reply.json()["message"]


async def test_text_parts_are_one_message(client: openai.AsyncOpenAI) -> None:
    first, second = question(3, 5).split("\n")
    parts = [{"type": "text", "text": f"{first}\n"}, {"type": "text", "text": second}]
    reply = await client.chat.completions.create(
        **ask(temperature=0) | {"messages": [{"role": "user", "content": parts}]}
    )
    whole = await client.chat.completions.create(**ask(temperature=0))
    assert (reply.usage, reply.choices[0].message) == (whole.usage, whole.choices[0].message)


async def test_the_engine_tells_what_it_serves(http: httpx.AsyncClient, model_folder: Path) -> None:
    assert (await http.get("/health")).status_code == 200
    info = (await http.get("/model_info")).json()
    assert info["model_path"] == str(model_folder)
    assert info["architectures"] == ["Qwen2ForCausalLM"]
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 8192)


async def test_an_idle_engine_says_so(http: httpx.AsyncClient, num_running: NumRunning) -> None:
    await is_idle(num_running)
    (load,) = (await http.get("/v1/loads")).json()["loads"]
    assert load["max_running_requests"] == 64
    assert (load["num_used_tokens"], load["utilization"]) == (0, 0)


@pytest.mark.soak
def test_sigterm_ends_calls_with_their_partial_text_and_the_process_with_0(
    start_engine: StartEngine, model_folder: Path
) -> None:
    with start_engine("--model-path", str(model_folder)) as (process, url), httpx.Client(timeout=LIMIT_S) as http:
        body = ask_endlessly("last", stream=True)
        with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert "assistant" in next(lines)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            told = [line for line in lines if line]
        assert '"finish_reason":"abort"' in told[-2]
        assert process.wait(LIMIT_S) == 0
        assert time.monotonic() - started < 5


async def test_sigterm_during_the_warm_up_leaves_no_half_made_model(tmp_path: Path) -> None:
    cache = tmp_path / "forebay"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay.engines.tiny", env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    )

    async def has_begun() -> bool:
        return any(cache.glob(".tiny-*"))

    try:
        await eventually(has_begun, 2 * LIMIT_S)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert list(cache.iterdir()) == []
