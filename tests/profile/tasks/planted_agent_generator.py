"""The same as an agent that talks to the gateway, which sees nothing but its calls."""

import asyncio
import json
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from forebay.generators.agent import AgentGenerator, AgentTask

TASK_TYPE = "planted_agent"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

BLOCKED: list[Any] = []
"""Once is enough: the rollouts of a group share the loop."""


@cache
def shared_client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://gateway.invalid", api_key="none", max_retries=0)


async def agent(task: AgentTask) -> str:
    client = shared_client().with_options(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = list(task.prompt)
    reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[LOOK])
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if task.row.get("fault") == "blocked_loop" and not BLOCKED:
        BLOCKED.append(task.instance_id)
        while not Path(task.row["begun"]).exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        time.sleep(task.row["seconds"])  # noqa: ASYNC251 - that is the fault
    for call in message.tool_calls or ():
        await asyncio.sleep(json.loads(call.function.arguments)["seconds"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "found"})
    last = await client.chat.completions.create(model=task.model, messages=messages, tools=[LOOK])
    return str(last.choices[0].message.content)


def reward_func(item: dict[str, Any]) -> float:
    if item.get("fault") == "reward":
        time.sleep(item["seconds"])
    return random.random()


def run_rollout(data: dict[str, Any]) -> None:
    generator = AgentGenerator.from_payload(data)
    generator.run_agent(data["input_file"], agent, reward_func)
