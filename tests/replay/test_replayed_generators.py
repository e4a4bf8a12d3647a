"""Whatever made a run, its replay needs neither that nor an engine: our base, and both of slime's contracts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.conftest import MakeServer
from tests.e2e.conftest import TASKS
from tests.e2e.payloads import make_payload, numbered_rows
from tests.kit import Json, NativeRun, ServerProcess, assert_error, write_generator
from tests.replay.recordings.recording_kit import damage_body, flip_bit, group_record, write_recording
from tests.replay.replay_kit import groups_of, plain, read_all, start_replay, until_ended

WRITES = """
import json, urllib.request

TASK_TYPE = {task_type!r}

def run_rollout(data):
    rows = [json.loads(line) for line in open(data["input_file"])]
    for row in rows:
        for n in range(int(data["num_repeat_per_sample"])):
            reward = (n + row["n"]) % 4 / 4 if row["n"] % 3 else 1.0
            name = row["instance_id"]
            sample = dict(uid=f"{{name}}/{{n}}", instance_id=name, messages=[], reward=reward)
            request = urllib.request.Request(
                data["remote_buffer_url"] + "/buffer/write",
                json.dumps(sample).encode(),
                {{"Content-Type": "application/json"}},
            )
            urllib.request.urlopen(request).read()
"""
CONTRACT_A = """
def is_valid_group(group, min_valid_group_size, task_type):
    instance_id, items = group
    full = len(items) >= min_valid_group_size
    return full and len({item["reward"] for item in items}) > 1, full

def filter_item(item, task_type):
    return item["reward"] < 0.75

def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
    instance_id, items = group
    return instance_id, [{**item, "raw_reward": item["reward"], "reward": 10 * item["reward"]} for item in items]
"""
CONTRACT_B = """
def is_valid_group(group, group_size, task_type):
    return len(group[1]) >= group_size

def transform_group(group, task_type):
    instance_id, items = group
    return instance_id, [{**item, "reward": 2 * item["reward"] - 1} for item in items]
"""


def test_of_our_base_generator(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(generators=Path(shutil.copytree(TASKS, tmp_path / "tasks")), start_wait_s=60)
    with ScriptedEngine(Answers()).in_thread() as engine:
        body = make_payload(tmp_path, engine.url, numbered_rows(12), max_attempts=1, name="parity")
        reply = server.client.post("/v1/runs", json=body)
        assert reply.is_success, reply.text
        recorded = NativeRun(server, reply.json()["run_id"])
        until_ended(recorded)
    (tmp_path / "rows.jsonl").unlink()
    shutil.rmtree(tmp_path / "tasks")
    replayed = start_replay(server, "parity")
    view = until_ended(replayed)
    assert (view["state"], view["engine_urls"]) == ("finished", [])
    assert read_all(replayed, size=1) == read_all(recorded, size=1) != []
    told = groups_of(replayed)
    assert told == groups_of(recorded)
    assert any(each["num_failed"] for each in told.values())
    assert view["counts"]["replay_hits"] == 12 * 8


class Answers:
    """Numbers; some calls fail for good."""

    def __init__(self) -> None:
        self._number = 0

    async def __call__(self, call: ScriptedCall) -> Reply:
        self._number += 1
        return Reply(text="no", error_status=400) if self._number % 11 == 0 else Reply(text=str(self._number))


@pytest.mark.parametrize(("task_type", "hooks"), [("contract_a", CONTRACT_A), ("contract_b", CONTRACT_B)])
def test_of_slimes_contracts(make_server: MakeServer, tmp_path: Path, task_type: str, hooks: str) -> None:
    """Over slime's routes, as its client reads: the same replies."""
    source = WRITES.format(task_type=task_type) + hooks
    write_generator(tmp_path / "tasks", source, f"{task_type}_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"instance_id": "row-{n}", "n": {n}}}\n' for n in range(9)))
    settings = {"input_file": str(rows), "min_valid_item_size_ratio": 0.5, "group_timeout_seconds": 1.0}
    recorded = server.start_slime("first", task_type, 4, **settings)
    until_ended(recorded)
    (tmp_path / "tasks" / f"{task_type}_generator.py").unlink()
    replayed = server.start_slime("second", task_type, 4, **settings, replay=recorded.run_id)
    until_ended(replayed)
    ours, theirs = fetch_all(server, "second"), fetch_all(server, "first")
    assert [plain(row) for row in ours] == theirs
    assert {row["replayed_from"]["run_id"] for row in ours} == {recorded.run_id}
    assert groups_of(replayed) == groups_of(recorded)


def fetch_all(server: ServerProcess, name: str) -> list[Json]:
    rows: list[Json] = []
    while (reply := server.client.post(f"/s/{name}/get_rollout_data", json={})).status_code == 200:
        data: Any = reply.json()
        if not data["success"]:
            break
        rows += data["data"]["data"]
    assert rows
    return rows


def test_of_a_file(make_server: MakeServer, tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    folder.mkdir()
    bodies = write_recording(folder / "sums.fbr", num_groups=4)
    write_recording(tmp_path / "other.fbr")
    server = make_server(input_roots=folder)
    run = start_replay(server, {"source": str(folder / "sums.fbr"), "steps": [[12, 13]]})
    view = until_ended(run)
    assert view["replay"]["source"] == str(folder / "sums.fbr")
    rows = [row for batch in read_all(run, size=1) for row in batch]
    assert len(rows) == 4
    assert {row["uid"] for row in rows} <= bodies.keys()
    refused = server.client.post("/v1/runs", json={"replay": str(tmp_path / "other.fbr")})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["field"] == "replay.source"


def test_of_a_damaged_file(server: ServerProcess, tmp_path: Path) -> None:
    """What is damaged costs its group; the others are replayed, and the run says what it could not."""
    path = tmp_path / "sums.fbr"
    bodies = write_recording(path, num_groups=3)
    damage_body(path, group_record(1).group_id)
    run = start_replay(server, str(path))
    view = until_ended(run)
    assert view["state"] == "finished"
    (warning,) = [each for each in view["warnings"] if "could not be replayed" in each]
    assert "a group could not be replayed" in warning
    assert "sums.fbr" in warning
    assert view["counts"] == {"replay_hits": 4, "replay_misses": 2}
    told = groups_of(run)
    assert [told[f"task-{n}", 0]["reason"] for n in (1, 2, 3)] == ["unreadable", "", ""]
    rows = [row for batch in read_all(run, size=1) for row in batch]
    assert {row["uid"] for row in rows} == set(list(bodies)[2:])


@pytest.mark.parametrize(
    ("damage", "status", "code", "said", "hint"),
    [
        ("", 507, "recording_damaged", "is not a recording", "forebay recording export"),
        ("empty", 404, "not_recorded", "has no run", "forebay recording export"),
        ("flipped", 507, "recording_damaged", "byte", "export the run again"),
    ],
)
def test_files_that_are_no_recording_of_a_run_are_refused(
    server: ServerProcess, tmp_path: Path, damage: str, status: int, code: str, said: str, hint: str
) -> None:
    path = tmp_path / "bad.fbr"
    path.write_text("" if damage else "{}")
    if damage == "flipped":
        path.unlink()
        write_recording(path)
        flip_bit(path, path.stat().st_size - 10)
    error = assert_error(server.client.post("/v1/runs", json={"replay": str(path)}), status, code)
    assert "bad.fbr" in error["message"]
    assert said in error["message"]
    assert hint in error["hint"]
