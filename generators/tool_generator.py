"""The built-in tool task: the model may call a calculator or Python for several turns before its answer is checked.

Copy this file to start your own agent: add your functions next to ``calculator`` and replace the reward function.
"""

from functools import partial
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.math_generator import reward_func
from forebay.generators.sandbox import Sandbox
from forebay.generators.tools import ToolBox, calculator, python_in

TASK_TYPE = "tool"
MAX_TURNS = 8


async def rollout_func(
    client: Any, messages: list[dict[str, Any]], sampling_params: dict[str, Any], max_turns: int = MAX_TURNS
) -> tuple[list[dict[str, Any]], str]:
    """Alternate model turns and tool calls until the model answers without a call or uses up its turns."""
    async with Sandbox() as sandbox:
        tools = ToolBox([calculator, python_in(sandbox)])
        for turn in range(1, max_turns + 1):
            messages, finish_reason = await single_turn(client, messages, sampling_params, tools.definitions)
            calls = messages[-1].get("tool_calls")
            if not calls or turn == max_turns:
                break
            messages += await tools.answer(calls)
    return messages, "max_turns" if calls else finish_reason


def _max_turns(given: Any) -> int:
    if given is None:
        return MAX_TURNS
    if not str(given).isdecimal() or int(given) < 1:
        raise InvalidInput(f"max_turns must be a whole number of at least 1 (got {given!r:.100})", field="max_turns")
    return int(given)


def run_rollout(data: dict[str, Any]) -> None:
    """Run the task with a start payload, whose optional ``max_turns`` defaults to 8."""
    generator = BaseGenerator.from_payload(data)
    rollout = partial(rollout_func, max_turns=_max_turns(data.get("max_turns")))
    generator.entry(data["input_file"], rollout, reward_func, data.get("num_epoch", 1))
