"""Sums with a second try, and a `span` that adds the time for reading an answer to a profile."""

import re

from forebay.generators.base import BaseGenerator, single_turn
from forebay.telemetry import span

TASK_TYPE = "traced-sums"
AGAIN = {"role": "user", "content": "Are you sure? Give the number once more."}


def last_number(text):
    """The last number of an answer; None if it has no number."""
    with span("parse", length=len(text)):  # a phase below the turn in which it happens
        numbers = re.findall(r"-?\d+", text)
        return int(numbers[-1]) if numbers else None


async def rollout_func(client, messages, sampling_params):
    messages, finish_reason = await single_turn(client, messages, sampling_params)
    if last_number(messages[-1]["content"]) is None:
        messages, finish_reason = await single_turn(client, [*messages, AGAIN], sampling_params)
    return messages, finish_reason


def reward_func(item):
    return float(last_number(item["messages"][-1]["content"]) == int(item["label"]))


def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], rollout_func, reward_func, data.get("num_epoch", 1))
