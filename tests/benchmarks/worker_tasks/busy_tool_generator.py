"""Two calls of an engine, and between them a tool that computes for 50 ms."""

import time

from costs import costs_of_passage

from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.tools import ToolBox

TASK_TYPE = "busy_tool"
TOOL_S = 0.05


def compute(number: int) -> str:
    """Take some time of a processor."""
    until_s = time.thread_time() + TOOL_S
    while time.thread_time() < until_s:
        number = number * 1_103_515_245 % 2_147_483_647
    return str(number)


async def rollout(client, messages, sampling_params):
    tools = ToolBox([compute])
    messages, _ = await single_turn(client, messages, sampling_params, tools.definitions)
    messages += await tools.answer(messages[-1]["tool_calls"])
    return await single_turn(client, messages, sampling_params, tools.definitions)


async def reward(_):
    return 1.0


def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    generator.entry(f"{data['input_file']}.first", rollout, reward)
    with costs_of_passage(generator):
        generator.entry(data["input_file"], rollout, reward)
