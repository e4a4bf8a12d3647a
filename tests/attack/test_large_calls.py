"""One agent's call of many megabytes leaves the calls of the others as quick as they were."""

import asyncio
import os

import httpx
import pytest

from tests.attack.hostile_engine import hostile_engine
from tests.attack.real_gateway import real_gateway
from tests.kit import children_with

MESSAGE = '{"role": "user", "content": "a"}'
LONGEST_S = 1.0
"""Of CPU: a call of another agent takes milliseconds; decoded on the loop, the large one holds it up for seconds."""


def loop_seconds() -> float:
    """CPU time of the thread in which the gateway's event loop runs, whatever else this machine does."""
    (gateway,) = children_with(os.getpid(), "forebay.gateway")
    (loop,) = [thread for thread in gateway.threads() if thread.id == gateway.pid]
    return float(loop.user_time + loop.system_time)


@pytest.mark.parametrize(("path", "num_messages"), [("chat/completions", 1_400_000), ("messages", 150_000)])
async def test_a_call_of_many_messages_holds_nobody_up(path: str, num_messages: int) -> None:
    messages = ", ".join([MESSAGE] * num_messages)
    large = f'{{"model": "scripted", "max_tokens": 9, "messages": [{messages}]}}'.encode()
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
