"""Rewards the parity of the answer's last digit, so that every group of numbered answers has a spread."""

from typing import Any

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "parity"


async def reward_func(item: dict[str, Any]) -> float:
    return float(item["messages"][-1]["content"][-1] in "13579")


def run_rollout(data: dict[str, Any]) -> None:
    print("buffer:", data["remote_buffer_url"])
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], single_turn, reward_func, data.get("num_epoch", 1))
