"""Two turns with a tool between them; a row says what goes wrong in its rollouts, and for how many seconds."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.tools import ToolBox

TASK_TYPE = "planted"


async def look(seconds: float) -> str:
    """Look something up.

    Args:
        seconds: how long that takes
    """
    await asyncio.sleep(seconds)
    return "found"


async def rollout_func(client: Any, messages: list[dict[str, Any]], params: dict[str, Any]) -> Any:
    tools = ToolBox([look])
    messages, _ = await single_turn(client, messages, params, tools.definitions)
    messages += await tools.answer(messages[-1]["tool_calls"])
    row = client.rollout.row
    if row.get("fault") == "blocked_loop" and client.rollout.slot == 0:
        while not Path(row["begun"]).exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        time.sleep(row["seconds"])  # noqa: ASYNC251 - that is the fault
    return await single_turn(client, messages, params, tools.definitions)


def reward_func(item: dict[str, Any]) -> float:
    if item.get("fault") == "reward":
        time.sleep(item["seconds"])
    return random.random()


def run_rollout(data: dict[str, Any]) -> None:
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], rollout_func, reward_func, data.get("num_epoch", 1))
