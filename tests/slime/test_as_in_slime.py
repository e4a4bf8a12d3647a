"""What clients and generator files of slime rely on: its routes, shapes and numbers."""

import statistics
from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.kit import IDLE, ServerProcess, make_group, make_sample, write_generator

SPLIT = """
def pad_group_data(group, group_size):
    return group[0], [dict(row) for row in group[1] for _ in range(2)]
"""


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = tmp_path_factory.mktemp("tasks")
    write_generator(tasks, IDLE.replace('"idle"', '"split"') + SPLIT, "split_generator.py")
    return module_servers(generators=tasks)


@pytest.mark.parametrize("prefix", ["", "/s/mine"])
def test_a_rollout_is_looked_at_and_stopped(make_server: MakeServer, prefix: str) -> None:
    client = make_server().client
    assert client.get(f"{prefix}/rollout_status").json() == {"job": None}
    assert client.post(f"{prefix}/stop_rollout", json={}).json() == {"had_job": False, "stopped": True, "job": None}
    start = {"task_type": "idle", "num_repeat_per_sample": "2"}
    run_id = client.post(f"{prefix}/start_rollout", json=start).json()["run_id"]
    job = client.get(f"{prefix}/rollout_status").json()["job"]
    assert (job["job_id"], job["alive"], job["stop_requested"], job["error"]) == (run_id, True, False, None)
    told = client.post(f"{prefix}/stop_rollout", json={"wait": True, "timeout_sec": 60}).json()
    assert (told["had_job"], told["stopped"]) == (True, True)
    stopped = {**job, "status": "stopped", "alive": False, "stop_requested": True}
    assert told["job"] == stopped == client.get(f"{prefix}/rollout_status").json()["job"]


def test_the_deviation_of_rewards_is_that_of_a_sample(server: ServerProcess) -> None:
    run = server.start_slime("deviation")
    rewards = [0.0, 0.25, 0.5, 1.0]
    run.write(*make_group("a", rewards))
    assert run.fetch()["data"]["meta_info"]["reward_std"] == pytest.approx(statistics.stdev(rewards))
    run.write(make_sample(instance_id="b", reward=1.0))
    assert run.fetch()["data"]["meta_info"]["reward_std"] == 0.0


def test_a_pad_hook_may_return_a_multiple_of_the_size(server: ServerProcess) -> None:
    run = server.start_slime("split", "split")
    run.write(*make_group("a", [0.0, 1.0, 0.0, 1.0]))
    rows = run.fetch()["data"]["data"]
    assert [row["raw_reward"] for row in rows] == [0.0, 0.0, 1.0, 1.0] * 2


def test_a_short_group_of_equal_rewards_is_dropped_when_its_size_is_valid(server: ServerProcess) -> None:
    limits = {"min_valid_group_size_ratio": 0.5, "group_timeout_seconds": 0.2, "min_timeout_group_size_ratio": 0.5}
    run = server.start_slime("short", **limits)
    run.write(*make_group("equal", [1.0, 1.0, 1.0]), *make_group("mixed", [1.0, 0.0, 1.0]))
    states = {group["instance_id"]: (group["state"], group["reason"]) for group in run.closed(2)}
    assert states == {"equal": ("discarded", "invalid"), "mixed": ("ready", "")}


def test_a_start_with_its_batch_size_reads_no_more_than_that(server: ServerProcess, tmp_path: Path) -> None:
    run = server.start_slime("sized", rollout_batch_size="2")
    for number in range(3):
        run.write(*make_group(number, [0.0, 1.0, 0.0, 1.0]))
    fetched = [[row["instance_id"] for row in run.fetch()["data"]["data"]] for _ in range(2)]
    assert fetched == [[0] * 4 + [1] * 4, [2] * 4]
