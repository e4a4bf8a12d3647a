"""One turn; what stands around ``entry`` says where it runs."""

import logging
import os
import sys

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "counted"


async def reward(item):
    return float(item["uid"].endswith("1"))


def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    print(f"before {generator.is_lead} in {os.getpid()}\n", end="", flush=True)

    async def rollout(client, messages, params):  # a closure: nothing of it is pickled
        return await single_turn(client, messages, {**params, "extra_body": {"user": TASK_TYPE}})

    totals = generator.entry(data["input_file"], rollout, reward)
    print(f"after {generator.is_lead} {totals.num_completed} in {os.getpid()}\n", end="", flush=True)
    print(f"openai {'openai' in sys.modules}\n", end="", flush=True)
    logging.getLogger(TASK_TYPE).info("is done")
