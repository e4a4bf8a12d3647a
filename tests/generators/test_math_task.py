"""The built-in math task."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from forebay.generators import math_generator


@pytest.mark.parametrize(
    ("label", "answer", "reward"),
    [
        ("72", "So she sold \\boxed{72} clips.", 1.0),
        ("72", "The answer is 72.", 1.0),
        ("72", "72", 1.0),
        (72, "\\boxed{72}", 1.0),
        ("72", "The answer is 71.", 0.0),
        ("72", "", 0.0),
        ("1,000", "It costs $1000$.", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("\\boxed{3}", "3", 1.0),
        ("x^2+1", "\\boxed{1+x^2}", 1.0),
        ("72", "72 or so, but finally \\boxed{70}", 0.0),
    ],
)
def test_boxed_and_plain_answers_are_checked(label, answer, reward) -> None:
    item = {"messages": [{"role": "assistant", "content": answer}], "label": label}
    assert math_generator.reward_func(item) == reward


async def test_a_payload_of_strings_runs_the_task(buffer, write_rows) -> None:
    rows = write_rows({"prompt": "2+2?", "label": "4"}, {"prompt": "2+3?", "label": "5"})

    def answer(call: ScriptedCall) -> str:
        return "I say \\boxed{4}."

    async with ScriptedEngine(answer) as engine:
        payload: dict[str, Any] = {
            "task_type": "math",
            "remote_engine_url": engine.url,
            "remote_buffer_url": buffer.url,
            "input_file": str(rows),
            "num_repeat_per_sample": "2",
            "num_process": "4",
            "num_epoch": "1",
            "max_tokens": "64",
            "sampling_params": {"max_tokens": 64, "temperature": 1.0},
            "skip_instance_ids": [],
        }
        async with asyncio.timeout(60):
            await asyncio.to_thread(math_generator.run_rollout, payload)
    rewards = {(sample["instance_id"], sample["slot"]): sample["reward"] for sample in buffer.samples}
    assert rewards == {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 0.0}
    assert buffer.progress[-1]["is_last_slot_reported"]


def test_the_template_is_short() -> None:
    assert len(Path(math_generator.__file__).read_text().splitlines()) <= 60
