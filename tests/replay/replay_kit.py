"""Runs to be replayed, and what they and their replays are compared by."""

import json
from typing import Any

from tests.kit import Json, NativeRun, ServerProcess, make_group, make_sample, poll_until

SIZE = 4
HOOKED = """
TASK_TYPE = "hooked"

def run_rollout(data):
    __import__("threading").Event().wait()

def is_valid_group(group_data, min_valid_group_size, task_type):
    instance_id, samples = group_data
    return True, True

def filter_item(item, task_type):
    return not item["extra_info"].get("is_spoilt")
"""
"""A generator that writes nothing itself, and drops what is marked."""
Told = dict[tuple[Any, int], Json]


def record(server: ServerProcess, task_type: str = "idle", **payload: Any) -> NativeRun:
    """A stopped run with three batches, steps 1 to 3, of two groups each, and groups that came to nothing."""
    run = server.start_run(task_type, SIZE, **payload)
    for step in (1, 2, 3):
        for name in ("a", "b"):
            write_group(run, f"{step}{name}", [0.0, 1.0, 0.5, 0.25])
        if step == 1:
            write_group(run, "equal", [1.0] * SIZE)
            if task_type == "hooked":
                write_group(run, "spoilt", [0.0, 1.0, 0.0, 1.0], extra_info={"is_spoilt": True})
            run.write(*make_group("failed", [None] * SIZE, epoch=0, status="failed", error="it broke"))
        batch = run.take(num_groups=2, step=step)
        run.checkpoint(step, batch)
    run.write(make_sample(uid="late", instance_id="1a", epoch=0, slot=1))
    run.stop()
    return run


def write_group(run: NativeRun, name: str, rewards: list[float], **changes: Any) -> None:
    samples = make_group(name, rewards, epoch=0, **changes)
    for slot, sample in enumerate(samples):
        sample |= {"slot": slot, "rollout_id": f"{name}-{slot}", "weight_version": 3, "response_length": 7}
    verdicts = run.write(*samples)
    assert all(verdict["status"] == 200 for verdict in verdicts), verdicts


def start_replay(server: ServerProcess, replay: Any, **payload: Any) -> NativeRun:
    """Start one over ``/v1`` that says nothing else."""
    reply = server.client.post("/v1/runs", json={"replay": replay, **payload})
    assert reply.is_success, reply.text
    return NativeRun(server, reply.json()["run_id"])


def until_ended(run: NativeRun) -> Json:
    """The run, once it has ended."""
    return poll_until(lambda: view if (view := run.view())["has_ended"] else {})


def read_all(run: NativeRun, size: int = 2, first_step: int = 1) -> list[list[Json]]:
    """Every batch of ``size`` groups; rows in their order, without the name of what they were replayed from."""
    batches: list[list[Json]] = []
    while True:
        reply = run.client.post(f"{run.path}/batches", json={"num_groups": size, "step": first_step + len(batches)})
        if reply.status_code == 410 or reply.json()["batch_id"] is None:
            return batches
        run.ack(reply.json())
        batches.append([plain(row) for row in reply.json()["data"]])


def plain(row: Json) -> Json:
    """A row as that of the run that was replayed."""
    return {name: value for name, value in row.items() if name != "replayed_from"}


def rows_of(*batches: Json) -> list[list[Json]]:
    return [batch["data"] for batch in batches]


def groups_of(run: NativeRun) -> Told:
    """What became of each group and of its samples."""
    told: Told = {}
    for each in run.groups():
        whole = run.group(each["group_id"])
        samples = [
            {name: sample[name] for name in ("uid", "slot", "fork", "outcome", "status", "reward", "error")}
            for sample in whole["samples"]
        ]
        state = "ready" if each["state"] in ("ready", "leased", "acked") else each["state"]
        told[each["instance_id"], each["epoch"]] = {
            **{name: each[name] for name in ("reason", "is_salvaged", "num_samples", "num_failed", "num_forks")},
            "state": state,
            "samples": sorted(samples, key=json.dumps),
        }
    return told
