"""The rollouts of one row end their process."""

import os

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "deadly"


async def rollout(client, messages, params):
    answered = await single_turn(client, messages, params)
    if client.rollout.instance_id == "row-3":
        os._exit(7)
    return answered


async def reward(item):
    return float(item["uid"].endswith("1"))


def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], rollout, reward)
