"""A task with the five functions of slime's full rollout buffer, under names of its author's choice."""

import json
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

TASK_TYPE = "five_functions"


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.loads(response.read())


def get_group_data_meta_info(everything):
    rewards = [item["reward"] for items in everything.values() for item in items]
    return {
        "total_samples": len(rewards),
        "num_groups": len(everything),
        "avg_reward": sum(rewards) / len(rewards) if rewards else 0,
        "best": max(rewards, default=None),
        "finished_groups": [],
    }


def is_valid_group(group_data, min_size, kind):
    is_finished = len(group_data[1]) >= min_size
    return is_finished and kind == TASK_TYPE, is_finished


def filter_item(entry, kind):
    return entry["reward"] >= 0.3


def normalize_group_data(batch, epsilon=0.5, algo="grpo"):
    instance_id, items = batch
    mean = sum(item["reward"] for item in items) / len(items)
    for item in items:
        item["raw_reward"] = item["reward"]
        item["reward"] = (item["reward"] - mean) / epsilon
    return instance_id, items


def pad_group_data(batch, wanted):
    instance_id, items = batch
    return instance_id, (items * wanted)[:wanted]


def one_sample(data, row):
    prompt = {"role": "user", "content": row["prompt"]}
    reply = post(data["remote_engine_url"] + "/v1/chat/completions", {"messages": [prompt]})
    answer = reply["choices"][0]["message"]
    number = int(answer["content"])
    item = {
        "uid": uuid.uuid4().hex,
        "instance_id": row["instance_id"],
        "messages": [prompt, answer],
        "reward": number % 10 / 10 if data.get("scored_by") == "table" else 0.3 + number % 97 / 200,
        "extra_info": {"timestamp": time.time(), "answer": answer["content"]},
    }
    post(data["remote_buffer_url"] + "/buffer/write", item)


def run_rollout(data):
    with open(data["input_file"]) as file:
        rows = [json.loads(line) for line in file]
    skip = list(data.get("skip_instance_ids") or [])
    work = []
    for _ in range(int(data["num_epoch"])):
        for row in rows:
            if row["instance_id"] in skip:
                skip.remove(row["instance_id"])
            else:
                work += [row] * int(data["num_repeat_per_sample"])
    with ThreadPoolExecutor(int(data["num_process"])) as pool:
        list(pool.map(lambda row: one_sample(data, row), work))
    return {"status": "done"}
