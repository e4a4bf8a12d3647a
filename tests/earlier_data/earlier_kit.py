"""The data directory that an earlier version wrote: what is in it, and what a server on it is asked."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from forebay.engines.scripted import Reply, ScriptedCall
from tests.kit import Json, NativeRun, ServerProcess, write_generator

HERE = Path(__file__).parent
ARCHIVE = HERE / "earlier.zip"
"""A data directory that ``make_data.py`` made with the server of its time, and what that said of it when it had died
and was started again."""
NO_ENGINE_PORT = 1
"""The engine of the time had this one, which no test's engine is given."""

INSTANCES = ["a", "b", "c", "d"]
GROUP_SIZE = 2
EPOCHS = 2
INPUT_NAME = "rows.jsonl"
STREAMS = ["plain", "based"]
LEASED: Json = {"num_groups": 2, "request_id": "of a trainer", "step": 4, "lease_s": 3_600}
TASKS = {
    "plain_generator.py": (HERE.parent / "slime" / "tasks" / "plain_generator.py").read_text(),
    "based_generator.py": """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "based"

async def number(item):
    return int(item["messages"][-1]["content"]) % 97 / 97

def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], single_turn, number, data["num_epoch"])
""",
    "hooked_generator.py": """
import threading
TASK_TYPE = "hooked"

def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
    return group[0], [item | {"reward": item["reward"] * 10} for item in group[1]]

def run_rollout(data):
    threading.Event().wait()
""",
}


class NumberingEngine:
    """Answers with "1", then "2", and so on; beyond its ``budget``, calls hang."""

    def __init__(self, budget: int | None = None) -> None:
        self.num_left = budget
        self.answered: Counter[str] = Counter()

    def __call__(self, call: ScriptedCall) -> Reply:
        if self.num_left == 0:
            return Reply(hang=True)
        if self.num_left is not None:
            self.num_left -= 1
        self.answered[call.prompt] += 1
        return Reply(text=str(self.answered.total()))


def make_folder(directory: Path, data: Path | None = None) -> ServerProcess:
    """A server that was not started yet, on a copy of ``data``, with the generators and their input."""
    tasks = directory / "tasks"
    for name, source in TASKS.items():
        write_generator(tasks, source, name)
    if data is not None:
        shutil.copytree(data, directory / "data")
    (directory / INPUT_NAME).write_text("".join(json.dumps({"instance_id": i, "prompt": i}) + "\n" for i in INSTANCES))
    return ServerProcess(directory, segment_bytes=1 << 16, replay_bytes=0, start_wait_s=60, is_preloaded=True)


def payload(task_type: str, engine_url: str) -> Json:
    """The start of a run that generates."""
    return {
        "task_type": task_type,
        "num_process": "1",
        "num_epoch": str(EPOCHS),
        "num_repeat_per_sample": str(GROUP_SIZE),
        "remote_engine_url": engine_url,
        "input_file": INPUT_NAME,
    }


def rows(run: NativeRun, **body: Any) -> list[str]:
    """The rows of a read, each with the very bytes that came."""
    reply = run.client.post(f"{run.path}/batches", json=body)
    assert reply.status_code == 200, reply.text
    return [bytes(row).decode() for row in msgspec.json.decode(reply.content, type=_Batch).data]


def ready_rows(run: NativeRun) -> list[str]:
    """Those of all groups that are ready, or full and not judged yet."""
    run.read(num_groups=100)
    return rows(run, num_groups=run.view()["groups"]["ready"])


class _Batch(msgspec.Struct):
    data: list[msgspec.Raw]


def look(run: NativeRun) -> Json:
    """Everything about a run that does not depend on when it is asked."""
    view = run.view()
    names = ("name", "task_type", "origin", "has_ended", "weight_version", "groups", "discarded", "checkpoints")
    return {
        **{name: view[name] for name in names},
        "all_groups": [_with_bodies(run, group["group_id"]) for group in run.groups()],
        "all_batches": [{**batch, "leased_at_s": None} for batch in run.batches()],  # leases begin anew at an opening
        "all_checkpoints": run.client.get(f"{run.path}/checkpoints").json()["checkpoints"],
        "closed": run.client.get(f"{run.path}/closed_groups").json()["groups"],
        "skip": run.client.get(f"{run.path}/skip_instance_ids").json()["skip_instance_ids"],
    }


def _with_bodies(run: NativeRun, group_id: str) -> Json:
    group: Json = run.client.get(f"{run.path}/groups/{group_id}", params={"bodies": True}).json()
    return group
