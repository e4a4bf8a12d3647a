"""A task as somebody wrote it for slime: no hooks, threads, nothing imported but the standard library."""

import json
import time
import urllib.request
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

TASK_TYPE = "plain"

REWARDS = {"1": 0.1, "2": 0.9, "3": 1.5, "4": 0.4, "5": -1.0, "6": 0.7, "7": 0.2, "0": 1.0}


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.loads(response.read())


def rollout(data, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    reply = post(data["remote_engine_url"] + "/v1/chat/completions", {"messages": messages})
    answer = reply["choices"][0]["message"]["content"]
    number = int(answer)
    reward = REWARDS[str(number % 8)] if data.get("scored_by") == "table" else number % 97 / 97
    item = {
        "uid": str(uuid.uuid4()),
        "instance_id": row["instance_id"],
        "messages": [*messages, {"role": "assistant", "content": answer}],
        "reward": reward,
        "extra_info": {"finish_reason": "stop", "answer": answer},
        "timestamp": str(time.time()),
    }
    post(data["remote_buffer_url"] + "/buffer/write", item)


def run_rollout(data):
    with open(data["input_file"]) as file:
        rows = [json.loads(line) for line in file]
    skip = Counter(data["skip_instance_ids"])
    with ThreadPoolExecutor(int(data["num_process"])) as pool:
        for _ in range(int(data["num_epoch"])):
            for row in rows:
                if skip[row["instance_id"]] > 0:
                    skip[row["instance_id"]] -= 1
                    continue
                for _ in range(int(data["num_repeat_per_sample"])):
                    pool.submit(rollout, data, row)
