"""The gateway before the real SGLang: what its clients see, what is recorded, and what a killed engine does."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from forebay.engines.capture.checking import check
from forebay.engines.capture.request_fields import texts_only
from tests.gateway.gateway_kit import GatewayAt, Json, OpenedAt, gateway_before
from tests.sglang.conftest import ENGINE_FLAGS, ENGINE_OPTIONS, HERE, end_group, free_port, running, wait_until_ok

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

LIMIT_S = 120.0
EXACT = 1e-4
SAY = {"role": "user", "content": "Say something."}
GREEDY: Json = {"temperature": 0, "max_tokens": 12}
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA: Json = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SHARED: list[Json] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 2},
    {"n": 2, "stream": True},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "stream": True},
    {"tools": [TOOL]},
    {"tools": [TOOL], "stream": True},
    {"stop": ["a", "e"]},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}, "max_tokens": 40},
    {"extra_body": {"return_token_ids": True}},
    {"extra_body": {"return_output_ids_in_sglext": True}, "stream": True},
]
BAD: list[bytes] = [
    b"no json",
    b"[1]",
    b"{}",
    b'{"model": "tiny", "messages": []}',
    b'{"model": "tiny", "messages": 3, "stream_options": "x", "n": "many"}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "2"}], "max_tokens": -1}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "2"}], "n": 0}',
    b'{"model": "tiny", "messages": [{"role": "nobody", "content": "2"}], "stream": true}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "2"}], "temperature": -3}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "2"}], "tool_choice": "required"}',
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(sglang_url: str) -> AsyncIterator[GatewayAt]:
    async with gateway_before(sglang_url) as gateway:
        gateway.http.timeout = httpx.Timeout(LIMIT_S)
        yield gateway


async def told(client: openai.AsyncOpenAI, fields: Json) -> Any:
    """Everything that the official client sees, but for what no two calls share."""
    asked = {"model": "tiny", "messages": [SAY], **GREEDY, **fields}
    answer = await client.chat.completions.create(**asked)
    if not fields.get("stream"):
        return _plain(answer.model_dump(warnings=False))
    return _merged([_plain(chunk.model_dump(warnings=False)) async for chunk in answer])


def _plain(answer: Json) -> Json:
    return {**answer, "id": bool(answer["id"]), "created": bool(answer["created"])}


def _merged(chunks: list[Json]) -> Json:
    """How much text a chunk has is chance: their fields, and the text of each choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    kinds = {json.dumps(_kind(chunk)) for chunk in chunks}
    return {"texts": texts, "ends": ends, "kinds": kinds, "usage": chunks[-1]["usage"]}


def _kind(value: Any) -> Any:
    """The fields of a chunk, without what they hold."""
    if isinstance(value, dict):
        return {name: _kind(each) for name, each in sorted(value.items()) if each is not None}
    return [_kind(value[0])] if isinstance(value, list) and value else type(value).__name__


@pytest.mark.parametrize("fields", SHARED, ids=lambda fields: ",".join(fields) or "plain")
async def test_the_openai_client_sees_what_the_engine_tells(gateway: GatewayAt, sglang_url: str, fields: Json) -> None:
    rollout = await gateway.open(f"shared-{time.monotonic_ns()}", deadline_s=LIMIT_S)
    async with (
        rollout.client() as through,
        openai.AsyncOpenAI(base_url=f"{sglang_url}/v1", api_key="k", max_retries=0) as directly,
    ):
        # But for the numbers of its metadata, which the protocol has not.
        assert await told(through, fields) == texts_only(await told(directly, fields))
    samples = (await rollout.close())["samples"]
    assert len(samples) == fields.get("n", 1)
    for sample in samples:
        assert len(sample["tokens"]) == len(sample["loss_mask"])
        assert sum(sample["loss_mask"]) > 0


CODEX: Json = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say something"}]}],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "mcp__docs", "tools": [{"type": "function", "name": "find", "parameters": {}}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "7"},
    "temperature": 1.0,
    "max_output_tokens": 8,
}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_codex_sends_is_answered_as_the_engines_own_route_answers_it(
    gateway: GatewayAt, sglang_url: str, stream: bool
) -> None:
    rollout = await gateway.open(f"codex-{stream}", deadline_s=LIMIT_S)
    body = {**CODEX, "stream": stream}
    directly = await gateway.http.post(f"{sglang_url}/v1/responses", json=body)
    through = await rollout.post("responses", body)
    assert (directly.status_code, through.status_code) == (200, 200), through.text
    told = await rollout.close()
    assert told["notes"] == {"left_out_responses_client_metadata": 1, "left_out_responses_tool_web_search": 1}
    assert sum(told["samples"][0]["loss_mask"]) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_completion_is_the_engines_own_and_ends_with_its_rollout(
    gateway: GatewayAt, sglang_url: str, stream: bool
) -> None:
    rollout = await gateway.open(f"text-{stream}", deadline_s=LIMIT_S)
    body = {"model": "tiny", "prompt": "one two", "temperature": 0, "max_tokens": 8, "stream": stream}
    directly = await gateway.http.post(f"{sglang_url}/v1/completions", json=body)
    through = await rollout.post("completions", body)
    assert _said(through, stream) == _said(directly, stream) != ""
    endless = {**body, "max_tokens": 400, "ignore_eos": True, "prompt": ["one", "two"]}
    asking = asyncio.create_task(rollout.post("completions", endless))
    await _busy(gateway, sglang_url)
    told = await rollout.close()
    assert "rollout_over" in (await asking).text
    assert (told["samples"], told["notes"]) == ([], {"unrecorded_completions": 2})
    await _busy(gateway, sglang_url, is_busy=False)


def _said(reply: httpx.Response, stream: bool) -> str:
    """The text of a completion."""
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line and "[DONE]" not in line]
    bodies = [json.loads(line) for line in lines] if stream else [reply.json()]
    return "".join(body["choices"][0]["text"] for body in bodies if body["choices"])


async def test_its_errors_are_the_engines(gateway: GatewayAt, sglang_url: str) -> None:
    rollout = await gateway.open("errors", deadline_s=LIMIT_S)
    headers = {"Authorization": f"Bearer {rollout.key}", "Content-Type": "application/json"}
    statuses = set()
    for body in BAD:
        directly, through = [
            await gateway.http.post(f"{url}/chat/completions", content=body, headers=headers)
            for url in (f"{sglang_url}/v1", rollout.base_url)
        ]
        assert directly.status_code == through.status_code, body
        assert _without_ids(directly) == _without_ids(through), body
        own = {"date", "server"}
        assert set(through.headers) - own == set(directly.headers) - own | {"x-forebay-rollout-id"}
        statuses.add(directly.status_code)
    assert 400 in statuses
    assert (await rollout.close())["samples"] == [] or 200 in statuses


def _without_ids(reply: httpx.Response) -> Any:
    if reply.status_code != httpx.codes.OK:
        return reply.content
    return sorted(reply.json()) if reply.headers["content-type"].startswith("application/json") else None


async def test_a_conversation_has_the_logprobs_of_the_engine(gateway: GatewayAt, sglang_url: str) -> None:
    rollout = await gateway.open("exact", deadline_s=LIMIT_S, sampling_params={"temperature": 1.0, "max_tokens": 24})
    messages: list[Json] = []
    for turn, is_stream in enumerate((False, True, False)):
        messages.append({"role": "user", "content": f"turn {turn}"})
        content = await _streamed(rollout, messages) if is_stream else await _whole(rollout, messages)
        messages.append({"role": "assistant", "content": content})
    ended = await rollout.close()
    for sample in ended["samples"]:
        compared = await check(sglang_url, sample)
        assert compared.max_delta <= EXACT
        assert compared.num_tokens > 0


async def _whole(rollout: OpenedAt, messages: list[Json], **fields: Any) -> str:
    return str((await rollout.chat(*messages, **fields))["choices"][0]["message"]["content"])


async def _streamed(rollout: OpenedAt, messages: list[Json], **fields: Any) -> str:
    async with rollout.client() as client:
        stream: Any = await client.chat.completions.create(model="tiny", messages=messages, stream=True, **fields)  # type: ignore[arg-type]
        return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_abort_in_the_middle_is_gone_on_with_token_by_token(
    gateway: GatewayAt, sglang_url: str, is_stream: bool
) -> None:
    rollout = await gateway.open(f"aborted-{is_stream}", deadline_s=LIMIT_S)
    fields = {"temperature": 1.0, "max_tokens": 150, "extra_body": {"ignore_eos": True}}
    asked = _streamed(rollout, [SAY], **fields) if is_stream else _by_client(rollout, fields)
    asking = asyncio.create_task(asked)
    await _busy(gateway, sglang_url)
    await gateway.http.post(f"{sglang_url}/abort_request", json={"abort_all": True})
    text = await asking
    ended = await rollout.close()
    (sample,) = ended["samples"]
    assert ended["counters"]["continued"] == 1
    assert sum(sample["loss_mask"]) == 150
    assert sample["messages"][-1]["content"] == text
    assert (await check(sglang_url, sample)).max_delta <= EXACT


async def _by_client(rollout: OpenedAt, fields: Json) -> str:
    async with rollout.client() as client:
        reply = await client.chat.completions.create(model="tiny", messages=[SAY], **fields)  # type: ignore[list-item]
        return str(reply.choices[0].message.content)


async def _busy(gateway: GatewayAt, url: str, *, is_busy: bool = True) -> None:
    """Return once the engine works, or does not any more."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        (rank,) = (await gateway.http.get(f"{url}/v1/loads?include=core")).json()["loads"]
        if bool(rank["num_running_reqs"] + rank["num_waiting_reqs"]) is is_busy:
            return
        assert time.monotonic() < until_s


async def test_closing_a_rollout_leaves_the_engine_idle(gateway: GatewayAt, sglang_url: str) -> None:
    rollout = await gateway.open("left", deadline_s=LIMIT_S)
    body = {"model": "tiny", "messages": [SAY], "max_tokens": 400, "ignore_eos": True}
    calls = [
        asyncio.create_task(rollout.post("chat/completions", {**body, "stream": n % 2 == 0, "n": 1 + n // 2}))
        for n in range(4)
    ]
    await _busy(gateway, sglang_url)
    began_s = time.monotonic()
    await rollout.close()
    await asyncio.gather(*calls)
    await _busy(gateway, sglang_url, is_busy=False)
    assert time.monotonic() - began_s < 15


async def test_a_run_goes_on_after_its_engine_was_killed(
    sglang_python: str, sglang_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {**ENGINE_OPTIONS, "--model-path": sglang_model, "--port": port}
    command = [sglang_python, HERE / "launch_engine.py", *(word for each in options.items() for word in each)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(  # noqa: ASYNC220 - it only starts
        [*map(str, command), *ENGINE_FLAGS], start_new_session=True, env=environ
    )
    try:
        await asyncio.to_thread(wait_until_ok, f"{url}/model_info")
        async with gateway_before(url) as gateway:
            gateway.http.timeout = httpx.Timeout(3 * LIMIT_S)
            rollouts = [await gateway.open(f"r{n}", deadline_s=3 * LIMIT_S) for n in range(4)]
            for rollout in rollouts:
                await _whole(rollout, [SAY], max_tokens=8)
            long = {"max_tokens": 400, "ignore_eos": True, "model": "tiny", "messages": [SAY]}
            streaming = asyncio.create_task(_until_broken(rollouts[3], long))
            asking = [asyncio.create_task(rollout.post("chat/completions", long)) for rollout in rollouts[:3]]
            await _busy(gateway, url)
            os.killpg(first.pid, signal.SIGKILL)
            with running([*command, *ENGINE_FLAGS], tmp_path / "second.log"):
                replies = await asyncio.gather(*asking)
                broken = await streaming
                told = [await rollout.close() for rollout in rollouts]
    finally:
        end_group(first)
    assert [reply.status_code for reply in replies] == [200] * 3
    failures = [[failure["kind"] for failure in each["failures"]] for each in told]
    if "engine_lost" in broken:  # else nothing had gone out yet, and it was asked again as the others
        assert failures == [[], [], [], ["engine"]]
    else:
        assert failures == [[]] * 4
    assert all(sum(sum(sample["loss_mask"]) for sample in each["samples"]) >= 400 for each in told[:3])


async def _until_broken(rollout: OpenedAt, body: Json) -> str:
    return (await rollout.post("chat/completions", {**body, "stream": True})).text
