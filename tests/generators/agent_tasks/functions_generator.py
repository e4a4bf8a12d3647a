"""Agents that are functions: each does what its row says."""

import sys

from openai import APIError, AsyncOpenAI, OpenAI

from forebay.generators.agent import AgentGenerator, Limits
from forebay.generators.base import EnvironmentFailed

TASK_TYPE = "functions"


async def ask(client, *history):
    """One call. The texts of the history are the user's and the assistant's by turns."""
    roles = [("user", "assistant")[n % 2] for n in range(len(history))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, history, strict=True)]
    reply = await client.chat.completions.create(model="scripted", messages=messages)
    return reply.choices[0].message.content


async def answer(task, client):
    return {"said": await ask(client, task.question), "row": task.row, "folder": str(task.folder)}


async def talk(task, client):
    first = await ask(client, task.question)
    return await ask(client, task.question, first, "And then?")


async def consult(task, client):
    """A second agent with a prompt of its own, in the middle of the first one's talk."""
    first = await ask(client, task.question)
    await ask(client, "You are another one.")
    return await ask(client, task.question, first, "And then?")


async def compact(task, client):
    """Forgets what it said, but for a summary."""
    first = await ask(client, task.question)
    second = await ask(client, task.question, first, "And then?")
    return await ask(client, f"So far: {second}")


async def shrug(task, client):
    first = await ask(client, task.question)
    try:
        return await ask(client, "engine down")
    except APIError:
        return first


async def crash(task, client):
    await ask(client, task.question)
    raise ValueError("out of ideas")


async def leave(task, client):
    await ask(client, task.question)
    sys.exit("enough")


async def crash_silently(task, client):
    return "I need no model"


async def break_world(task, client):
    await ask(client, task.question)
    raise EnvironmentFailed("the simulator is gone")


async def return_nonsense(task, client):
    await ask(client, task.question)
    return object()


async def run(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        return await globals()[task.row["do"]](task, client)


def run_blocking(task):
    with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        reply = client.chat.completions.create(model="scripted", messages=task.prompt)
    return reply.choices[0].message.content


async def reward_func(item):
    """What the row says, if it is a number."""
    assert item["agent"]["wall_s"] >= 0
    return float(item["label"])


def run_rollout(data):
    agent = run_blocking if data.get("blocking") else run
    generator = AgentGenerator.from_payload(data)
    limits = Limits(wall_s=float(data.get("wall_s", 60)))
    generator.run_agent(data["input_file"], agent, reward_func, limits=limits)
