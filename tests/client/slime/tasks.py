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
import json
from urllib.request import Request, urlopen
TASK_TYPE = "exam"

def run_rollout(data):
    with open(data["input_file"]) as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        for slot, reward in enumerate(row["rewards"]):
            outcome = {"status": "failed", "error": "no answer"} if reward is None else {"reward": reward}
            write(data, {**row, **outcome, "uid": f"{row['instance_id']}/{slot}", "epoch": 0, "slot": slot,
                         "messages": [{"role": "assistant", "content": str(data["sampling_params"])}]})

def write(data, sample):
    body = json.dumps(sample).encode()
    urlopen(Request(data["remote_buffer_url"] + "/buffer/write", body, {"Content-Type": "application/json"})).read()
"""


def write_tasks(folder: Path) -> Path:
    """Put both into ``folder``."""
    write_generator(folder, RAGGED, "ragged_generator.py")
    write_generator(folder, EXAM, "exam_generator.py")
    return folder
