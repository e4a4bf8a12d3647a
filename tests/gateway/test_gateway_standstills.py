"""Deadlines at the gateway, which stand still while those of the run do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from forebay.engines.scripted import Reply
from forebay.gateway.runs import registry
from tests.gateway.conftest import Stage, codes_of
from tests.gateway.gateway_kit import LIMIT_S, USER, GatewayAt, Json, gateway_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Json = {"model": "any", "messages": [USER]}
DEADLINE_S = 0.3
"""For one that stands still from the beginning, or is to pass."""
LONG_S = 5.0
"""For one that counts for a moment in which it must not pass."""
OVER = (410, "rollout_over")


@asynccontextmanager
async def still(gateway: GatewayAt) -> AsyncIterator[None]:
    """Within this the deadlines of the run stand still."""
    await gateway.buffer.stand(True)
    num_asked = gateway.buffer.num_asked
    yield
    assert gateway.buffer.num_asked == num_asked, "the gateway waits for news, it does not ask again and again"
    await gateway.buffer.stand(False)


async def assert_waits(call: "asyncio.Task[httpx.Response]", deadline_s: float = DEADLINE_S) -> None:
    """For longer than the deadline."""
    done, _ = await asyncio.wait([call], timeout=deadline_s + 0.5)
    assert not done


async def test_a_call_outlives_standstills_and_then_has_its_time(stage: Stage) -> None:
    stage(Reply(hang=True))
    async with still(stage.gateway):
        rollout = await stage.open(deadline_s=LONG_S)
        call = asyncio.create_task(rollout.post("chat/completions", ASK))
        await stage.busy()
    async with still(stage.gateway):
        await assert_waits(call, deadline_s=LONG_S)
    assert codes_of([await call]) == [OVER]
    assert [failure["kind"] for failure in (await rollout.close())["failures"]] == ["engine"]


async def test_a_rollout_that_is_opened_meanwhile_has_all_its_time(stage: Stage) -> None:
    stage(Reply(hang=True))
    async with still(stage.gateway):
        rollout = await stage.open(deadline_s=DEADLINE_S)
        call = asyncio.create_task(rollout.post("chat/completions", {**ASK, "stream": True}))
        await stage.busy()
        await assert_waits(call)
    assert "rollout_over" in (await call).text
    await rollout.close()


async def test_time_that_was_up_before_stays_up(stage: Stage) -> None:
    stage(Reply(hang=True))
    rollout = await stage.open(deadline_s=0.05)
    assert codes_of([await rollout.post("chat/completions", ASK)]) == [OVER]
    async with still(stage.gateway):
        assert codes_of([await rollout.post("chat/completions", ASK)]) == [OVER]


async def test_a_rollout_can_be_closed_meanwhile(stage: Stage) -> None:
    stage(Reply(hang=True))
    async with still(stage.gateway):
        rollout = await stage.open(deadline_s=DEADLINE_S)
        call = asyncio.create_task(rollout.post("chat/completions", ASK))
        await stage.busy()
        assert (await rollout.close())["num_calls"] == 1
        assert codes_of([await call]) == [OVER]
    await stage.busy(0)


async def test_a_rollout_that_nobody_closes_is_forgotten_only_afterwards(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "KEEP_S", 0.0)
    monkeypatch.setattr(registry, "LOOK_S", 0.01)
    async with still(stage.gateway):
        rollout = await stage.open(deadline_s=DEADLINE_S)
        path = f"rollouts/{rollout.rollout_id}"
        await asyncio.sleep(2 * DEADLINE_S)  # no event tells that nothing has happened
        assert (await stage.gateway.ask("GET", path)).status_code == 200
    async with asyncio.timeout(LIMIT_S):
        while (await stage.gateway.ask("GET", path)).status_code != 404:
            pass


async def test_a_call_of_a_captured_generator_outlives_it_too(stage: Stage) -> None:
    stage(Reply(hang=True))
    capturing = {"secret": "patient", "group_deadline_s": DEADLINE_S}
    async with gateway_before(stage.engine.url, capturing=capturing) as gateway:
        url = f"{gateway.url}/gateway/patient/v1/chat/completions"
        async with still(gateway):
            call = asyncio.create_task(gateway.http.post(url, json=ASK))
            await stage.busy()
            await assert_waits(call)
        assert codes_of([await call]) == [OVER]
