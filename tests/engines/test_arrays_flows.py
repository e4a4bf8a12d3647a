"""Rollouts with arrays per token on the scripted engine."""

import random
from collections.abc import AsyncIterator

import pytest

from forebay.engines.scripted import Reply, ScriptedCall
from tests.engines.arrays_flows import RecordedArrays
from tests.engines.moe_engine import MoEEngine


def answer(call: ScriptedCall) -> Reply:
    if call.body.get("logit_bias"):
        return Reply(text="", reasoning="hm " * 20)
    if (call.body.get("n") or 1) > 1:  # each choice begins first at times
        delay_s = 0.03 * ((call.number // 2 + call.choice) % 2)
        return Reply(text=f"{call.number % 2}{call.number:015}", queue_s=delay_s, finish_reason="length")
    if (call.limit or 0) < 100:
        return Reply(text=f"{random.randrange(10**9)}")
    return Reply(text=("123456789 " * 150)[len(call.said) :], tokens_per_s=500.0)


@pytest.fixture
async def arrays_engine() -> AsyncIterator[str]:
    async with MoEEngine(answer) as engine:
        yield engine.url


class TestScripted(RecordedArrays):
    pass
