"""Generator files written for slime run unchanged, and their batches carry the numbers of slime's formulas."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess, SlimeRun
from tests.slime.engine import CountingEngine

EXACT = 1e-9


@pytest.fixture(scope="module")
def tasks_server(module_servers: MakeServer, tasks: Path) -> ServerProcess:
    return module_servers(generators=tasks, start_wait_s=60)


def start(server: ServerProcess, engine: CountingEngine, path: Path, task_type: str, **payload: Any) -> SlimeRun:
    path.write_text(json.dumps({"instance_id": "only", "prompt": "count"}) + "\n")
    body = {"num_process": "1", "num_epoch": "1", "remote_engine_url": engine.url, "input_file": str(path)}
    return server.start_slime(task_type, task_type, **{"group_size": 8, **body, **payload})


def read(run: SlimeRun) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    body = {"batch_size": 1, "timeout": 25, "wait": True}
    data = run.client.post(f"{run.prefix}/buffer/read", json=body).json()["data"]
    run.stop()
    return data["data"], data["meta_info"]


def test_without_hooks_the_formulas_of_the_full_version_hold(
    tasks_server: ServerProcess, engine: CountingEngine, tmp_path: Path
) -> None:
    run = start(tasks_server, engine, tmp_path / "in.jsonl", "plain", scored_by="table")
    rows, meta = read(run)
    arrived = [0.1, 0.9, 1.5, 0.4, -1.0, 0.7, 0.2, 1.0]
    kept = [reward for reward in arrived if 0 <= reward <= 1]
    mean = sum(kept) / 6
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in kept) / 6)
    scaled = [(reward - mean) / (deviation + 1e-8) * 8 / 6 for reward in kept]
    expected = [scaled[0] / 2, scaled[1] / 2, *scaled[2:], scaled[0] / 2, scaled[1] / 2]
    assert [row["reward"] for row in rows] == pytest.approx(expected, abs=EXACT)
    assert [row["raw_reward"] for row in rows] == [*kept, *kept[:2]]
    assert [row["extra_info"]["answer"] for row in rows] == ["1", "2", "4", "6", "7", "8", "1", "2"]
    average = sum(arrived) / 8
    assert meta["avg_reward"] == pytest.approx(average, abs=EXACT)
    assert meta["reward_std"] == pytest.approx(math.sqrt(sum((r - average) ** 2 for r in arrived) / 7), abs=EXACT)
    assert (meta["reward_min"], meta["reward_max"], meta["total_samples"]) == (-1.0, 1.5, 8)
    assert meta["finished_groups"] == ["only"]


def test_the_five_functions_of_a_file_decide(
    tasks_server: ServerProcess, engine: CountingEngine, tmp_path: Path
) -> None:
    run = start(tasks_server, engine, tmp_path / "in.jsonl", "five_functions", scored_by="table")
    rows, meta = read(run)
    kept = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    scores = [(reward - 0.55) / 0.5 for reward in kept]
    assert [row["reward"] for row in rows] == pytest.approx([*scores, *scores[:2]], abs=EXACT)
    assert [row["raw_reward"] for row in rows] == pytest.approx([*kept, *kept[:2]], abs=EXACT)
    assert (meta["best"], meta["total_samples"], meta["num_groups"]) == (0.8, 8, 1)
    assert meta["avg_reward"] == pytest.approx(0.45, abs=EXACT)
    assert meta["finished_groups"] == ["only"]


def test_transform_group_is_all_that_happens_to_a_group_of_the_simplified_version(
    tasks_server: ServerProcess, engine: CountingEngine, tmp_path: Path
) -> None:
    run = start(tasks_server, engine, tmp_path / "in.jsonl", "transforming", num_process="2")
    rows, meta = read(run)
    assert len(rows) == 8
    for row in rows:
        assert row["reward"] == pytest.approx(int(row["extra_info"]["answer"]) / 97 * 2 - 1, abs=EXACT)
        assert "raw_reward" not in row
        assert row["task"] == "transforming"
    assert meta["finished_groups"] == ["only"]


def test_groups_of_the_simplified_version_without_transform_go_out_as_they_came(
    tasks_server: ServerProcess, engine: CountingEngine, tmp_path: Path
) -> None:
    source = (tasks_server.generators / "plain_generator.py").read_text().replace('"plain"', '"untouched"')
    source += "\n\ndef is_valid_group(group, group_size, task_type):\n    return len(group[1]) >= group_size\n"
    source += "\n\ndef normalize_group_data(group):\n    return group[0], [i | {'reward': 0} for i in group[1]]\n"
    (tasks_server.generators / "untouched_generator.py").write_text(source)
    run = start(tasks_server, engine, tmp_path / "in.jsonl", "untouched", scored_by="table")
    rows, _ = read(run)
    assert [row["reward"] for row in rows] == [0.1, 0.9, 1.5, 0.4, -1.0, 0.7, 0.2, 1.0]
    assert not any("raw_reward" in row for row in rows)
