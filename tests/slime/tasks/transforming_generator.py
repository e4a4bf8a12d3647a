"""A task for slime's simplified rollout buffer: ``transform_group``, and worker processes with a class of their own."""

import json
import multiprocessing
import time
import urllib.request
import uuid

TASK_TYPE = "transforming"


class Work:
    def __init__(self, engine, buffer, row):
        self.engine, self.buffer, self.row = engine, buffer, row

    def run(self):
        prompt = [{"role": "user", "content": self.row["prompt"]}]
        reply = post(self.engine + "/v1/chat/completions", {"messages": prompt})
        answer = reply["choices"][0]["message"]["content"]
        item = {
            "uid": uuid.uuid4().hex,
            "instance_id": self.row["instance_id"],
            "messages": [*prompt, {"role": "assistant", "content": answer}],
            "reward": int(answer) % 97 / 97,
            "extra_info": {"answer": answer},
            "timestamp": time.time(),
        }
        post(self.buffer + "/buffer/write", item)


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.loads(response.read())


def is_valid_group(group, group_size, task_type):
    return len(group[1]) >= group_size


def normalize_group_data(group):
    raise AssertionError("nobody calls this one")


def transform_group(group, task_type):
    instance_id, items = group
    for item in items:
        item["reward"] = item["reward"] * 2 - 1
        item["task"] = task_type
    return instance_id, items


def do(work):
    work.run()


def run_rollout(data):
    with open(data["input_file"]) as file:
        rows = [json.loads(line) for line in file]
    skip = list(data["skip_instance_ids"])
    work = []
    for _ in range(int(data["num_epoch"])):
        for row in rows:
            if row["instance_id"] in skip:
                skip.remove(row["instance_id"])
                continue
            one = Work(data["remote_engine_url"], data["remote_buffer_url"], row)
            work += [one] * int(data["num_repeat_per_sample"])
    with multiprocessing.get_context("spawn").Pool(int(data["num_process"])) as pool:
        pool.map(do, work, chunksize=1)
