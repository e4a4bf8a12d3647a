"""The built-in math task: one question, one answer, checked by math-verify. Copy this file to start your own task."""

import logging
from typing import Any

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "math"

# It warns in every process that its own time limit is off; we use ours.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def reward_func(item: dict[str, Any]) -> float:
    """1 if the last message's answer, boxed or plain, equals the row's ``label``; else 0."""
    from math_verify import parse, verify  # slow to import, and only needed here

    answer = item["messages"][-1]["content"]
    # Its time limit needs alarms, which only work in main threads; the base generator limits reward functions anyway.
    gold = parse(f"${item['label']}$", parsing_timeout=None)
    given = parse(answer, parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def run_rollout(data: dict[str, Any]) -> None:
    """Run the task with a start payload."""
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], single_turn, reward_func, data.get("num_epoch", 1))
