"""Rollouts of two calls: between them their engine goes away. Each does what the payload's ``do`` says."""

import asyncio
import sys

from openai import APIError, AsyncOpenAI

from forebay.generators.agent import AgentGenerator, Limits
from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "outages"
PROGRAM = """
import os
from urllib.request import Request, urlopen
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(2):
    body = b'{"model": "m", "messages": [{"role": "user", "content": "q"}]}'
    urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


async def twice(client, messages, params):
    """A rollout function of two turns."""
    messages, _ = await single_turn(client, messages, params)
    return await single_turn(client, [*messages, {"role": "user", "content": "more"}], params)


async def time_out(client, messages, params):
    """Answers with what it has when its second call takes too long."""
    messages, _ = await single_turn(client, messages, params)
    try:
        async with asyncio.timeout(10):
            return await single_turn(client, [*messages, {"role": "user", "content": "more"}], params)
    except TimeoutError:
        return [*messages, {"role": "assistant", "content": "no idea"}], "stop"


def swallow(client, messages, params):
    """A function in a thread, which hides whatever goes wrong."""
    for _ in range(2):
        try:
            client.chat.completions.create(model="m", messages=messages)
        except BaseException:  # noqa: BLE001 - as code does that is to go on whatever happens
            return [*messages, {"role": "assistant", "content": "no idea"}], "stop"
    return messages, "stop"


async def ask_twice(client):
    """The engine answers the first call, however long that takes."""
    for patient in (client.with_options(timeout=60), client):
        await patient.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])


async def wait(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        await ask_twice(client)


async def give_up(task):
    """Raises what its client does, which is more impatient than the run."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, timeout=2, max_retries=1) as client:
        await ask_twice(client)


async def answer_at_once(task):
    """Answers with what it has when a call fails. Its client waits long enough to find the engine gone."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, timeout=10, max_retries=0) as client:
        try:
            await ask_twice(client)
        except APIError:
            return "no idea"


async def reward_func(item):
    return 0.0


def run_rollout(data):
    if data["do"] in ("twice", "time_out", "swallow"):
        BaseGenerator.from_payload(data).entry(data["input_file"], globals()[data["do"]], reward_func)
        return
    agent = [sys.executable, "-c", PROGRAM] if data["do"] == "command" else globals()[data["do"]]
    limits = Limits(wall_s=float(data["wall_s"]))
    AgentGenerator.from_payload(data).run_agent(data["input_file"], agent, reward_func, limits=limits)
