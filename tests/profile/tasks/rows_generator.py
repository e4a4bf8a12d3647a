"""Two turns with a tool between them. Replies and rows say how long the tool takes, if it raises, and the reward."""

import asyncio
import random
from typing import Any

from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.tools import ToolBox

TASK_TYPE = "rows"


async def search(s: float, bad: bool = False) -> str:
    """Search something.

    Args:
        s: seconds that it takes
        bad: whether it raises
    """
    await asyncio.sleep(s)
    if bad:
        raise RuntimeError("the index is broken")
    return "found"


async def rollout_func(client: Any, messages: list[dict[str, Any]], params: dict[str, Any]) -> Any:
    tools = ToolBox([search])
    messages, _ = await single_turn(client, messages, params, tools.definitions)
    messages += await tools.answer(messages[-1]["tool_calls"])
    return await single_turn(client, messages, params, tools.definitions)


async def reward_func(item: dict[str, Any]) -> float:
    # In the process of the run: its workers would have to start first.
    return float(item["reward"]) if "reward" in item else random.random()


def run_rollout(data: dict[str, Any]) -> None:
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], rollout_func, reward_func, data.get("num_epoch", 1))
