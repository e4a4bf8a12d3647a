"""One agent's call of many megabytes leaves the calls of the others as quick as they were."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from tests.attack.hostile_engine import hostile_engine
from tests.attack.real_gateway import real_gateway
from tests.gateway.gateway_kit import OpenedAt
from tests.kit import children_with

MESSAGE = '{"role": "user", "content": "a"}'
LONGEST_S = 1.0
"""Of CPU: a call of another agent takes milliseconds; decoded on the loop, the large one holds it up for seconds."""
ROOM_BYTES = 256 << 20
MARGIN = 1.5
"""What a call takes in memory is an estimate, and what a rollout has recorded is kept beside it."""


def body_of(num_messages: int) -> bytes:
    messages = ", ".join([MESSAGE] * num_messages)
    return f'{{"model": "scripted", "max_tokens": 9, "messages": [{messages}]}}'.encode()


def loop_seconds() -> float:
    """CPU time of the thread in which the gateway's event loop runs, whatever else this machine does."""
    (gateway,) = children_with(os.getpid(), "forebay.gateway")
    (loop,) = [thread for thread in gateway.threads() if thread.id == gateway.pid]
    return float(loop.user_time + loop.system_time)


@pytest.mark.parametrize(("path", "num_messages"), [("chat/completions", 1_400_000), ("messages", 150_000)])
async def test_a_call_of_many_messages_holds_nobody_up(path: str, num_messages: int) -> None:
    large = body_of(num_messages)
    with hostile_engine() as engine:
        async with real_gateway(engine.url) as gateway, httpx.AsyncClient(timeout=300) as http:
            one, other = await gateway.open("one", deadline_s=600), await gateway.open("other", deadline_s=600)
            url = f"{one.anthropic_url}/v1/messages" if path == "messages" else f"{one.base_url}/{path}"
            headers = {"Authorization": f"Bearer {one.key}", "content-type": "application/json"}
            call = asyncio.create_task(http.post(url, content=large, headers=headers))
            waits_s = []
            while not call.done():
                began_s = loop_seconds()
                await other.chat()
                waits_s.append(loop_seconds() - began_s)
            assert call.result().status_code == 200, call.result().text[:300]
            assert max(waits_s) < LONGEST_S, waits_s


def peak_bytes() -> int:
    """The most memory that the gateway has had so far."""
    (gateway,) = children_with(os.getpid(), "forebay.gateway")
    status = Path(f"/proc/{gateway.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_calls_of_many_messages_wait_for_each_other_and_do_not_add_up(path: str) -> None:
    body = body_of(100_000)
    if path == "responses":
        body = body.replace(b'"messages"', b'"input"').replace(b"max_tokens", b"max_output_tokens")
    with hostile_engine() as engine:
        settings = {"max_body_bytes": ROOM_BYTES, "max_bodies_bytes": ROOM_BYTES}
        async with real_gateway(engine.url, **settings) as gateway, httpx.AsyncClient(timeout=300) as http:
            before = peak_bytes()
            opened = [await gateway.open(f"r-{number}", deadline_s=600) for number in range(5)]

            async def call(rollout: OpenedAt, content: bytes) -> httpx.Response:
                url = f"{rollout.anthropic_url}/v1/messages" if path == "messages" else f"{rollout.base_url}/{path}"
                headers = {"Authorization": f"Bearer {rollout.key}", "content-type": "application/json"}
                return await http.post(url, content=content, headers=headers)

            replies = await asyncio.gather(*(call(each, body) for each in opened))
            assert [reply.status_code for reply in replies] == [200] * len(opened)
            assert peak_bytes() - before < MARGIN * ROOM_BYTES
            refused = await call(opened[0], body.replace(b"[{", b"[" + f"{MESSAGE}, ".encode() * 450_000 + b"{"))
            assert refused.status_code == 413
            assert "max_bodies_bytes" in refused.text
            again = await call(opened[0], body)
            assert again.status_code == 200
