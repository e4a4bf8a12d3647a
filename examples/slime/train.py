"""A trainer that uses the rollout buffer as slime's does: start, poll, train, remember finished groups.

    python examples/slime/train.py --buffer-url http://127.0.0.1:8889 --engine-url http://127.0.0.1:30000

Stopped and started again with the same --checkpoint, it resumes where it was.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import httpx

HERE = Path(__file__).resolve().parent
GROUP_SIZE = 4


def start(options, finished):
    """Start a run, or after a restart attach to the earlier one, which the buffer finds by the finished ids."""
    payload = {
        "num_process": "8",
        "num_epoch": "1",
        "remote_engine_url": options.engine_url,
        "remote_buffer_url": options.buffer_url,
        "task_type": "parity",
        "input_file": str(HERE / "questions.jsonl"),
        "num_repeat_per_sample": str(GROUP_SIZE),
        "max_tokens": "32",
        "sampling_params": {"max_tokens": 32, "temperature": 1.0, "top_p": 1.0},
        "skip_instance_ids": finished,
        # A run whose generator does not report its end, ends this many seconds after its last sample.
        "group_timeout_seconds": str(options.group_timeout_s),
    }
    httpx.post(f"{options.buffer_url}/start_rollout", json=payload, timeout=60).raise_for_status()


def fetch(options):
    """Poll for groups. Returns rows and meta info, or None at the run's end, where slime's client keeps polling."""
    while True:
        reply = httpx.post(f"{options.buffer_url}/get_rollout_data", json={}, timeout=100)
        if reply.status_code == 410:
            return None
        result = reply.raise_for_status().json()
        if result["success"]:
            return result["data"]["data"], result["data"]["meta_info"]
        time.sleep(options.poll_s)


def train(rows):
    """A stand-in for training: count the groups of samples with normalised rewards that it would learn from."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["instance_id"]].append(row)
    assert all(len(group) == GROUP_SIZE for group in groups.values())
    print(f"trained on {len(groups)} groups, rewards {[round(row['reward'], 2) for row in rows]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buffer-url", default="http://127.0.0.1:8889")
    parser.add_argument("--engine-url", default="http://127.0.0.1:30000")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.json"))
    parser.add_argument("--poll-s", type=float, default=3.0)
    parser.add_argument("--group-timeout-s", type=float, default=10.0)
    options = parser.parse_args()
    finished = json.loads(options.checkpoint.read_text()) if options.checkpoint.exists() else []
    start(options, finished)
    while (fetched := fetch(options)) is not None:
        rows, meta_info = fetched
        train(rows)
        finished += meta_info["finished_groups"]
        options.checkpoint.write_text(json.dumps(finished))
    print(f"the run has ended; {len(finished)} groups are finished", flush=True)


if __name__ == "__main__":
    main()
