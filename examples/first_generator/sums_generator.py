"""A first task: sums of two numbers. One question, one answer, a reward between 0 and 1."""

import re

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "sums"


def reward_func(item):
    """1 for the right sum, less the further the last number of the answer is from it, 0 without a number."""
    numbers = re.findall(r"-?\d+", item["messages"][-1]["content"])
    return 1 / (1 + abs(int(numbers[-1]) - int(item["label"]))) if numbers else 0.0


def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], single_turn, reward_func, data.get("num_epoch", 1))
