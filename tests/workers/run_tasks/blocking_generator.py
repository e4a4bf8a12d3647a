"""A rollout that computes in the event loop, and never ends."""

import asyncio
import time

from forebay.generators.base import BaseGenerator

TASK_TYPE = "blocking"


async def rollout(client, messages, params):
    print("begun")
    while client.rollout.instance_id == "row-0":
        time.sleep(0.05)  # noqa: ASYNC251 - that is what it is for
    await asyncio.Event().wait()


async def reward(item):
    return 0.0


def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], rollout, reward)
