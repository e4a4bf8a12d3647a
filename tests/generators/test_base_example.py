"""The example, run as its README says."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedEngine

FOLDER = Path(__file__).parents[2] / "examples" / "first_generator"


@pytest.fixture
def sums_generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import sums_generator

    yield sums_generator
    del sys.modules["sums_generator"]


async def test_the_first_generator_fills_its_groups(buffer, sums_generator) -> None:
    async with ScriptedEngine(lambda call: "3" if call.prompt == "1+2=" else "I do not know") as engine:
        payload = {
            "task_type": sums_generator.TASK_TYPE,
            "input_file": str(FOLDER / "sums.jsonl"),
            "remote_engine_url": engine.url,
            "remote_buffer_url": buffer.url,
            "sampling_params": {"max_tokens": 8, "temperature": 1.0},
        }
        async with asyncio.timeout(60):
            await asyncio.to_thread(sums_generator.run_rollout, payload)
    rewards = {sample["instance_id"]: sample["reward"] for sample in buffer.samples}
    assert rewards == {"sum-1": 1.0, "sum-2": 0.0, "sum-3": 0.0, "sum-4": 0.0}
    assert len(buffer.samples) == 8


def test_the_example_is_as_short_as_it_claims() -> None:
    assert len((FOLDER / "sums_generator.py").read_text().splitlines()) <= 22
