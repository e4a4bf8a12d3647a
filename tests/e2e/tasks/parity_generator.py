"""Rewards the parity of the answer's bytes: a spread within every group, whatever the model says.

A row with ``hangs`` is asked about for ever.
"""

from typing import Any

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "parity"


async def rollout_func(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    while client.rollout.row.get("hangs"):
        await single_turn(client, messages, params | {"max_tokens": 1900, "ignore_eos": True})
    return await single_turn(client, messages, params)


async def reward_func(item: dict[str, Any]) -> float:
    return float(sum(item["messages"][-1]["content"].encode()) % 2)


def run_rollout(data: dict[str, Any]) -> None:
    print("buffer:", data["remote_buffer_url"])
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], rollout_func, reward_func, data.get("num_epoch", 1))
