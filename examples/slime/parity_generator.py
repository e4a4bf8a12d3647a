"""A typical generator for slime: plain functions and requests, without any import from Forebay."""

import json
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

TASK_TYPE = "parity"


def post(url, body):
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as reply:
        return json.load(reply)


def reward(answer):
    """1 for an answer of even length: meaningless, but it varies between answers."""
    return float(len(answer) % 2 == 0)


def roll_out(data, row):
    body = {"model": "default", "messages": row["prompt"], **data["sampling_params"]}
    choice = post(data["remote_engine_url"] + "/v1/chat/completions", body)["choices"][0]
    answer = choice["message"]["content"]
    item = {
        "uid": str(uuid.uuid4()),
        "instance_id": row["instance_id"],
        "messages": [*row["prompt"], {"role": "assistant", "content": answer}],
        "reward": reward(answer),
        "extra_info": {"finish_reason": choice["finish_reason"]},
    }
    post(data["remote_buffer_url"] + "/buffer/write", item)


def run_rollout(data):
    with open(data["input_file"]) as file:
        rows = [json.loads(line) for line in file]
    to_skip = Counter(data["skip_instance_ids"])
    with ThreadPoolExecutor(int(data["num_process"])) as pool:
        tasks = []
        for _ in range(int(data["num_epoch"])):
            for row in rows:
                if to_skip[row["instance_id"]]:
                    to_skip[row["instance_id"]] -= 1
                    continue
                tasks += [pool.submit(roll_out, data, row) for _ in range(int(data["num_repeat_per_sample"]))]
        for task in tasks:
            task.result()


def normalize_group_data(group):
    """A read hook of slime's contract A: subtract the mean reward."""
    instance_id, items = group
    mean = sum(item["reward"] for item in items) / len(items)
    for item in items:
        item["raw_reward"] = item["reward"]
        item["reward"] -= mean
    return instance_id, items
