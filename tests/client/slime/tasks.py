"""Generator files for slime's tests: groups of another size, and samples that their input decides."""

from pathlib import Path

from tests.kit import write_generator

RAGGED = """
import threading
TASK_TYPE = "ragged"

def run_rollout(data):
    threading.Event().wait()

def filter_item(item, task_type):
    return not item["extra_info"].get("drop")

def pad_group_data(group, group_size):
    return group
"""
EXAM = """
import json, threading
from urllib.request import Request, urlopen
TASK_TYPE = "exam"

def run_rollout(data):
    with open(data["input_file"]) as file:
        rows = [json.loads(line) for line in file]
    if not rows:  # it is the test that stops it
        threading.Event().wait()
    for row in rows:
        for slot, reward in enumerate(row["rewards"]):
            outcome = {"status": "failed", "error": "no answer"} if reward is None else {"reward": reward}
            write(data, {**row, **outcome, "uid": f"{row['instance_id']}/{slot}", "epoch": 0, "slot": slot,
                         "messages": [{"role": "assistant", "content": str(data["sampling_params"])}]})

def write(data, sample):
    body = json.dumps(sample).encode()
    urlopen(Request(data["remote_buffer_url"] + "/buffer/write", body, {"Content-Type": "application/json"})).read()
"""
ALTERNATING = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "alternating"

async def reward_func(item):
    return float(item["slot"] % 2)

async def rollout_func(client, messages, sampling_params):
    client.rollout.for_reward["slot"] = client.rollout.slot
    return await single_turn(client, messages, sampling_params)

def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], rollout_func, reward_func, data["num_epoch"])
"""


def write_tasks(folder: Path) -> Path:
    """Put all of them into ``folder``."""
    write_generator(folder, RAGGED, "ragged_generator.py")
    write_generator(folder, EXAM, "exam_generator.py")
    write_generator(folder, ALTERNATING, "alternating_generator.py")
    return folder
