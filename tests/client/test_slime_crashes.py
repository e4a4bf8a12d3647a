"""Training with slime, ended without a word at every place: the model that is left has seen each group once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess, write_generator

ROOT = Path(__file__).parents[2]
COUNTED = """
import json
from urllib.request import Request, urlopen

TASK_TYPE = "counted"

def run_rollout(data):
    with open(data["input_file"]) as file:
        names = [json.loads(line)["instance_id"] for line in file]
    skipped = set(data.get("skip_instance_ids", ()))
    for name in names:
        for slot in range(data["group_size"]):
            if name not in skipped:
                write(data, name, slot)

def write(data, name, slot):
    sample = {
        "uid": f"{name}/{slot}", "instance_id": name, "epoch": 0, "slot": slot, "reward": float(slot),
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.5, -0.25],
        "extra_info": {"finish_reason": "stop"},
    }
    body = json.dumps(sample).encode()
    urlopen(Request(data["remote_buffer_url"] + "/buffer/write", body, {"Content-Type": "application/json"})).read()
"""
NUM_GROUPS = 12
CRASHES = ["fetched:0", "leased:1", "trained:1", "model:1", "fetched:3", "saved:3", "leased:5"]


@pytest.fixture
def server(make_server: MakeServer, tmp_path: Path) -> ServerProcess:
    write_generator(tmp_path / "tasks", COUNTED, "counted_generator.py")
    (tmp_path / "input.jsonl").write_text("".join(f'{{"instance_id": "g{n}"}}\n' for n in range(NUM_GROUPS)))
    return make_server(generators=tmp_path / "tasks")


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whatever_is_left_of_a_training_it_goes_on_with_the_same_groups(
    server: ServerProcess, tmp_path: Path, mode: str
) -> None:
    for crash in [*CRASHES, "nowhere"]:
        command = [sys.executable, "-m", "tests.client.slime_trainer", server.url, tmp_path, tmp_path / "input.jsonl"]
        done = subprocess.run([*command, mode, crash], cwd=ROOT, check=False, capture_output=True, text=True)
        assert done.returncode == (0 if crash == "nowhere" else 1), f"{crash}: {done.stderr}"
    rollouts = json.loads((tmp_path / "model.json").read_text())
    assert [name for rollout in rollouts for name in rollout] == [f"g{n}" for n in range(NUM_GROUPS)]
    (run,) = server.client.get("/v1/runs").json()["runs"]
    assert run["groups"] == {"open": 0, "ready": 0, "leased": 0, "acked": NUM_GROUPS, "discarded": 0}
    assert run["samples"]["member"] == 2 * NUM_GROUPS
    assert run["checkpoints"] == list(range(6))
