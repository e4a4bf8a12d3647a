"""A close whose answer was lost: asked again, it answers again."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from forebay.core.ids import run_rid_prefix
from forebay.engines.scripted import Reply
from forebay.gateway.runs import rollouts
from forebay.generators.agents.gateway import GatewayLink
from forebay.web.serving import serve_app
from tests.client.faulty_proxy import FaultyProxy
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import LIMIT_S, RUN_ID, RUN_KEY, USER, Json, OpenedAt
from tests.kit import assert_error

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Json = {"model": "any", "messages": [USER]}


async def close_and_leave(rollout: OpenedAt) -> None:
    """Ask for the close over a connection that ends before the answer."""
    address = httpx.URL(rollout.gateway.url)
    assert address.port
    _, writer = await asyncio.open_connection(address.host, address.port)
    path = f"/gateway/rollouts/{rollout.rollout_id}/close"
    headers = f"Host: gateway\r\nAuthorization: Bearer {RUN_KEY}\r\nContent-Length: 0"
    writer.write(f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def is_over(rollout: OpenedAt) -> bool:
    return (await rollout.post("chat/completions", ASK)).status_code == 401


async def test_a_close_whose_connection_broke_is_answered_the_next_time(stage: Stage) -> None:
    stage("four")
    rollout = await stage.open()
    await rollout.chat()
    told = await rollout.record()
    await close_and_leave(rollout)
    async with asyncio.timeout(LIMIT_S):
        while not await is_over(rollout):
            pass
    assert [await rollout.close(), await rollout.close()] == [told, told]
    assert len(told["samples"]) == 1


async def test_one_that_comes_while_the_first_still_waits_gets_the_same(stage: Stage) -> None:
    stage(Reply(text="begun", hang=True))
    rollout = await stage.open()
    call = asyncio.create_task(rollout.post("chat/completions", ASK))
    await stage.busy()
    first, second = await asyncio.gather(rollout.close(), rollout.close())
    assert first == second == await rollout.close()
    assert first["num_calls"] == 1
    assert (await call).status_code == 410


async def test_a_rollout_opened_again_is_another_one(stage: Stage) -> None:
    stage("four")
    rollout = await stage.gateway.open("again")
    await rollout.chat()
    assert (await rollout.close())["num_calls"] == 1
    again = await stage.gateway.open("again")
    assert (await again.close())["num_calls"] == 0
    assert (await rollout.close())["num_calls"] == 0


async def test_answers_are_not_kept_beyond_their_bounds(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage("four")
    first, second = await stage.open(), await stage.open()
    monkeypatch.setattr(rollouts, "MAX_BYTES", 1)
    await first.close()
    await first.close()
    await second.close()
    lost = await stage.gateway.ask("POST", f"rollouts/{first.rollout_id}/close")
    assert_error(lost, 404, "not_found")
    assert (await second.close())["num_calls"] == 0, "the newest is kept in any case"
    monkeypatch.setattr(rollouts, "KEEP_S", 0.0)
    third = await stage.open()
    await third.close()
    old = await stage.gateway.ask("POST", f"rollouts/{third.rollout_id}/close")
    assert_error(old, 404, "not_found")


async def test_they_are_the_runs_own(stage: Stage) -> None:
    await stage.gateway.register(stage.engine.url, run_id="run-other0000000", key="other-key")
    rollout = await stage.open()
    await rollout.close()
    foreign = await stage.gateway.ask("POST", f"rollouts/{rollout.rollout_id}/close", key="other-key")
    assert_error(foreign, 404, "not_found")
    await stage.gateway.forget("run-other0000000")


@pytest_asyncio.fixture(loop_scope="module")
async def lossy(stage: Stage) -> AsyncIterator[FaultyProxy]:
    """What stands between a run process and the gateway."""
    with FaultyProxy(stage.gateway.url) as proxy:
        yield proxy


async def test_a_run_process_asks_again(stage: Stage, lossy: FaultyProxy) -> None:
    stage("four")

    async def address(_: object) -> JSONResponse:
        return JSONResponse({"url": lossy.url, "key": RUN_KEY})

    app = Starlette(routes=[Route("/w/key/gateway", address, methods=["POST"])])
    async with serve_app(app) as port, GatewayLink(f"http://127.0.0.1:{port}/w/key") as link:
        opened = await link.open("asked-again", rid_prefix=run_rid_prefix(RUN_ID), deadline_s=60, sampling_params={})
        rollout = OpenedAt(stage.gateway, "asked-again", opened.base_url, opened.anthropic_url, opened.key)
        await rollout.chat()
        lossy.plan("lose reply", "lose request", path="/close")
        record = await link.close("asked-again")
    assert lossy.is_calm
    assert (record.num_calls, len(record.samples)) == (1, 1)
    assert len(lossy.requests("/close")) == 3
