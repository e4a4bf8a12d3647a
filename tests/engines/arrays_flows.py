"""Rollouts whose samples have arrays per token: on the scripted and on the real engine, of agents and of generators.

A prefill of a sample's tokens returns the routed experts that the engine has kept for them, which are those that it
used. Every row of a sample must be equal to them, and no token but the last may lack one.
"""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forebay.client import Rows
from forebay.client.trainer.read_arrays import gather_rows, side_arrays
from forebay.core.binary_sample import SAMPLES_TYPE, split_samples
from forebay.core.parts import NamedPart
from forebay.core.safetensors_format import read_blob
from forebay.generators.base import BaseGenerator
from forebay.web.serving import serve_app
from tests.engines.engine_wire import Wire
from tests.gateway.gateway_kit import RUN_KEY, GatewayAt, OpenedAt, gateway_before
from tests.generators.conftest import FakeBuffer
from tests.kit import Json

ARRAYS = ["routed_experts", "sampling_mask", "top_logprobs:3"]
WIDTH = 12
"""Experts of a token: both engines have three layers, and four experts for each token in each of them."""
LIMIT_S = 120.0
DIGITS: Json = {"max_tokens": 12, "extra_body": {"regex": "[0-9]{8,11}"}}
"""The tokens of such a reply are the same in the next prompt."""
VANISHING: Json = {"max_tokens": 40, "logit_bias": {"1": 100}, "extra_body": {"ignore_eos": True}}
"""The reply has tokens without text, so the next prompt is shorter than the tokens so far."""
LONG: Json = {"max_tokens": 1_000, "extra_body": {"ignore_eos": True}}
EQUAL: Json = {"max_tokens": 16, "extra_body": {"ignore_eos": True}}
"""All choices have as many tokens."""
NUM_FORKS, NUM_STREAMS = 20, 12

Flow = Callable[[Any], Awaitable[None]]
"""What an agent does with its ``AsyncOpenAI`` client."""


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def said(client: Any, messages: Sequence[Json], *, stream: bool = False, **fields: Any) -> Json:
    """The message of the first choice."""
    asked = {"model": "tiny", "messages": messages, "temperature": 1.0, **fields}
    answer = await client.chat.completions.create(**asked, stream=stream)
    text = reasoning = ""
    if not stream:
        message = answer.choices[0].message
        return {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning_content}
    async for chunk in answer:
        for choice in chunk.choices:
            if choice.index == 0:
                text += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    return {"role": "assistant", "content": text, "reasoning_content": reasoning or None}


@dataclass
class Stage:
    """Where an agent before the gateway, or a rollout function, runs a flow. ``replies`` are those of the engine."""

    is_agent: bool
    url: str
    engine: Wire
    replies: list[str]
    gateway: GatewayAt
    buffer: FakeBuffer
    folder: Path

    async def run(self, flow: Flow, *, is_whole: bool = True) -> "Recorded":
        """Compare each row with the engine's; ``is_whole`` if no token may lack one."""
        recorded = await self.recorded(flow)
        for sample, rows in zip(recorded.samples, recorded.routes, strict=True):
            assert not is_whole or list(rows) == list(range(len(sample["tokens"]) - 1))
            kept = await self.routes_of(sample["tokens"])
            assert {at: row for at, row in rows.items() if row != kept[at]} == {}
        return recorded

    async def recorded(self, flow: Flow) -> "Recorded":
        return await (self._by_agent(flow) if self.is_agent else self._by_function(flow))

    async def _by_agent(self, flow: Flow) -> "Recorded":
        rollout = await self.gateway.open(deadline_s=LIMIT_S)
        async with rollout.client(timeout=LIMIT_S) as client:
            await flow(client)
        return await closed(rollout)

    async def _by_function(self, flow: Flow) -> "Recorded":
        async def rollout(client: Any, messages: list[Any], _: Json) -> Any:
            await flow(client)
            return messages, "stop"

        async def reward(_: Json) -> float:
            return 1.0

        rows = self.folder / "rows.jsonl"
        rows.write_text('{"prompt": "begin"}')
        self.buffer.plan["group_size"] = 1
        generator = BaseGenerator(self.url, self.buffer.url, max_attempts=1, arrays=ARRAYS)
        await generator.run_async(rows, rollout, reward)
        assert [one["error"] for one in self.buffer.samples if "error" in one] == []
        return Recorded(self.buffer.samples, self.buffer.parts)

    async def routes_of(self, tokens: list[int]) -> list[list[int]]:
        asked = {"return_routed_experts": True, "routed_experts_start_len": 0}
        told = await self.engine.generate(0, input_ids=tokens, **asked)
        return _decoded(told["meta_info"]["routed_experts"])

    @property
    def num_received(self) -> int:
        """Rows of routed experts in all replies."""
        found = re.findall(r'"routed_experts": ?"([^"]+)"', "".join(self.replies))
        return sum(len(_decoded(each)) for each in found)


def _decoded(encoded: str) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(base64.b64decode(encoded), np.int32).reshape(-1, WIDTH).tolist()
    return rows


class Recorded:
    """The samples of a flow with their parts by digest: their arrays, and their routed experts by token."""

    def __init__(self, samples: Sequence[Json], parts: Mapping[str, bytes | memoryview], **record: Any) -> None:
        self.samples, self.parts, self.counters = samples, parts, record.get("counters", {})
        blobs = {digest: read_blob(part) for digest, part in parts.items()}
        self.arrays = [gather_rows(side_arrays(one), blobs, one.get("arrays", ())) for one in samples]
        self.routes = [_by_token(arrays["routed_experts"]) if arrays else {} for arrays in self.arrays]


def _by_token(rows: Rows) -> dict[int, list[int]]:
    tokens = [token for first, end in rows.tokens for token in range(first, end)]
    return dict(zip(tokens, rows.data.tolist(), strict=True))


async def closed(rollout: OpenedAt) -> Recorded:
    """Close a rollout of an agent. Returns its record with the parts."""
    headers = {"Authorization": f"Bearer {RUN_KEY}", "Accept": SAMPLES_TYPE}
    url = f"{rollout.gateway.url}/gateway/rollouts/{rollout.rollout_id}/close"
    reply = await rollout.gateway.http.post(url, headers=headers, timeout=LIMIT_S)
    *frames, record = split_samples(reply.content)
    return Recorded(parts={part.digest: part.data for part in map(NamedPart.read, frames)}, **json.loads(record))


@asynccontextmanager
async def stage_before(engine_url: str, folder: Path, *, is_agent: bool) -> AsyncIterator[Stage]:
    replies: list[str] = []

    async def passed_on(request: Request) -> Response:
        url, content = f"{request.url.path}?{request.url.query}", await request.body()
        reply = await http.request(request.method, url, content=content, headers={"Content-Type": "application/json"})
        replies.append(reply.text)
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("Content-Type"))

    app = Starlette(routes=[Route("/{path:path}", passed_on, methods=["GET", "POST"])])
    async with httpx.AsyncClient(base_url=engine_url, timeout=LIMIT_S) as http, serve_app(app) as port:
        url = f"http://127.0.0.1:{port}"
        async with gateway_before(url, arrays=ARRAYS) as gateway, FakeBuffer().served() as buffer:
            yield Stage(is_agent, url, Wire(http, ""), replies, gateway, buffer, folder)


class RecordedArrays:
    """The rollouts. A module gives the fixture ``arrays_engine``, an address."""

    @pytest.fixture(params=["gateway", "generator"])
    async def stage(self, request: pytest.FixtureRequest, arrays_engine: str, tmp_path: Path) -> AsyncIterator[Stage]:
        async with stage_before(arrays_engine, tmp_path, is_agent=request.param == "gateway") as stage:
            yield stage

    async def test_clean_turns_ask_only_for_new_rows(self, stage: Stage) -> None:
        async def twelve_turns(client: Any) -> None:
            messages: list[Json] = []
            for turn in range(12):
                messages.append(user(f"turn {turn}"))
                messages.append(await said(client, messages, stream=turn % 3 == 1, **DIGITS))

        (sample,) = (await stage.run(twelve_turns)).samples
        num_rows = len(sample["tokens"]) - 1
        assert stage.num_received <= 1.1 * num_rows
        turns = [span for span in sample["token_spans"] if span["source"] == "llm"]
        assert sum(turn["end"] - 1 for turn in turns) >= 5 * num_rows

    async def test_forks_share_the_rows_of_their_beginning(self, stage: Stage) -> None:
        async def forks(client: Any) -> None:
            messages = [user("begin " * 20)]
            messages.append(await said(client, messages, **DIGITS))
            for number in range(NUM_FORKS):
                await said(client, [*messages, user(f"fork {number}")], stream=number % 2 > 0, **DIGITS)

        recorded = await stage.run(forks)
        assert len(recorded.samples) >= NUM_FORKS
        distinct = {tuple(one["tokens"][: at + 1]) for one in recorded.samples for at in range(len(one["tokens"]) - 1)}
        blobs = map(read_blob, recorded.parts.values())
        stored = sum(blob["routed_experts"].shape[0] for blob in blobs if "routed_experts" in blob)
        assert stored <= 1.05 * len(distinct)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_prompt_shorter_than_the_known_tokens_has_its_rows(self, stage: Stage, stream: bool) -> None:
        async def shrinking(client: Any) -> None:
            messages = [user("begin")]
            for fields in (VANISHING, DIGITS, VANISHING, DIGITS):
                messages.append(await said(client, messages, stream=stream, **fields))
                messages.append(user("go on"))

        await stage.run(shrinking)
        assert "is higher than the number of input tokens" in "".join(stage.replies)

    async def test_an_answer_that_was_aborted_and_continued_has_the_rows_of_both_parts(self, stage: Stage) -> None:
        async def aborted(client: Any) -> None:
            answer = asyncio.create_task(said(client, [user("begin")], **LONG))
            await stage.engine.wait_load(1)
            for _ in range(3):  # until it has tokens
                await stage.engine.generate(0, input_ids=[5, 6, 7])
            await stage.engine.post("/abort_request", abort_all=True)
            await answer

        (sample,) = (await stage.run(aborted)).samples
        assert sum(sample["loss_mask"]) == LONG["max_tokens"]
        assert '"abort"' in "".join(stage.replies)

    async def test_each_choice_of_a_whole_reply_has_its_rows(self, stage: Stage) -> None:
        async def choices(client: Any) -> None:
            first = await said(client, [user("begin")], n=2, **DIGITS)
            await said(client, [user("begin"), first, user("go on")], **DIGITS)

        assert len((await stage.run(choices)).samples) == 2

    async def test_of_the_choices_of_a_stream_one_has_rows(self, stage: Stage) -> None:
        async def streamed(client: Any) -> None:
            for number in range(NUM_STREAMS):
                await said(client, [user(f"begin {number}")], n=2, stream=True, **EQUAL)

        recorded = await stage.run(streamed, is_whole=False)
        num_tokens = [len(sample["tokens"]) for sample in recorded.samples]
        missing = [num - 1 - len(rows) for num, rows in zip(num_tokens, recorded.routes, strict=True)]
        assert (missing.count(0), max(missing)) == (NUM_STREAMS, 15)  # the others have their prompts' rows

    async def test_sampled_tokens_have_the_ids_that_top_k_left_and_the_most_probable(self, stage: Stage) -> None:
        async def masked(client: Any) -> None:
            await said(client, [user("begin")], max_tokens=12, extra_body={"top_k": 5, "ignore_eos": True})

        recorded = await stage.run(masked)
        (sample,), (arrays,) = recorded.samples, recorded.arrays
        num_tokens, num = len(sample["tokens"]), sum(sample["loss_mask"])
        ids, offsets = arrays["sampling_mask"].csr(num_tokens, num_tokens - num)
        assert offsets.tolist() == [5 * at for at in range(num + 1)]
        assert all(token in kept for token, kept in zip(sample["tokens"][-num:], ids.reshape(-1, 5), strict=True))
        assert arrays["sampling_logprobs"].data.shape == (num,)
        assert arrays["top_ids"].data.shape == arrays["top_logprobs"].data.shape == (num, 3)
        assert (np.diff(arrays["top_logprobs"].data) <= 0).all()
