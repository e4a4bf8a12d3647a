"""``reward_range``: which rewards count, by how a run was started and what it says; and rewards of true and false."""

import asyncio
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import IDLE, Json, NativeRun, ServerProcess, assert_error, make_group, write_generator
from tests.server.test_tensor_reads import read_tensors, token_group
from tests.server.test_tensor_reads import write as write_binary

SIGNS = [1.0, -1.0, -1.0, -1.0]
NDJSON = {"Content-Type": "application/x-ndjson"}
GZIP = {"Content-Type": "application/json", "Content-Encoding": "gzip"}

OWN_VALIDITY = """
def is_valid_group(group, min_valid_group_size, task_type):
    return len(group[1]) >= min_valid_group_size, len(group[1]) >= min_valid_group_size
"""
WRAPPED_FILTER = """
from forebay.hooks import hookimpl

@hookimpl(wrapper=True)
def filter_item(item):
    return (yield)
"""
SEES_TYPES = """
def filter_item(item, task_type):
    return type(item["reward"]) is float
"""
JUDGED = """
from forebay.generators.base import BaseGenerator

TASK_TYPE = "judged"

async def rollout_func(client, messages, sampling_params):
    return [*messages, {"role": "assistant", "content": "yes"}], "stop"

def reward_func(item):
    return item["label"] == "odd"

def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], rollout_func, reward_func)
"""


def with_hooks(server: ServerProcess, name: str, hooks: str) -> str:
    """The task type of a generator file with these hooks, whose samples the test writes."""
    write_generator(server.generators, IDLE.replace('"idle"', f'"{name}"') + hooks, f"{name}_generator.py")
    return name


def raw_rewards(batch: Json) -> list[float]:
    return [row["raw_reward"] for row in batch["data"]]


def shown_range(run: NativeRun) -> Any:
    return run.view()["settings"]["reward_range"]


def test_of_forty_groups_with_rewards_of_both_signs_all_unequal_ones_are_delivered(server: ServerProcess) -> None:
    dice = random.Random(40)
    groups = {number: [dice.choice([-1.0, 1.0]) for _ in range(4)] for number in range(40)}
    unequal = {number: rewards for number, rewards in groups.items() if len(set(rewards)) == 2}
    assert 20 < len(unequal) < 40
    run = server.start_run()
    run.write(*[sample for number, rewards in groups.items() for sample in make_group(number, rewards)])
    batch = run.take(num_groups=len(unequal))
    got: dict[Any, list[float]] = {}
    for row in batch["data"]:
        got.setdefault(row["instance_id"], []).append(row["raw_reward"])
        assert (row["reward"] > 0) == (row["raw_reward"] > 0)
    assert got == unequal
    assert run.view()["discarded"] == {"invalid": 40 - len(unequal)}
    run.stop()


def test_the_range_is_slimes_for_slime_starts_and_any_finite_number_for_native_ones(server: ServerProcess) -> None:
    assert shown_range(server.start_run()) is None
    assert shown_range(server.start_slime()) == [0.0, 1.0]
    assert shown_range(server.start_slime("named")) == [0.0, 1.0]
    assert shown_range(server.start_run(reward_range=[-2, "2.5"])) == [-2.0, 2.5]
    assert shown_range(server.start_slime("wide", reward_range=[-1, 1])) == [-1.0, 1.0]
    assert shown_range(server.start_slime("open", reward_range=None)) is None


@pytest.mark.parametrize(("given", "is_delivered"), [([-1, 1], True), (None, True), (..., False)])
def test_what_a_slime_start_says_holds_and_its_default_is_slimes(
    server: ServerProcess, given: Any, is_delivered: bool
) -> None:
    said = {} if given is ... else {"reward_range": given}
    run = server.start_slime("signs", **said)
    run.write(*make_group("a", SIGNS))
    answer = run.fetch()
    assert answer["success"] is is_delivered
    assert [row["raw_reward"] for row in answer["data"]["data"]] == (SIGNS if is_delivered else [])
    run.stop()


@pytest.mark.parametrize(
    "given", [[1, 0], [0, 0], [0], [0, 1, 2], "0…1", 1, {"low": 0}, ["a", 1], [0, 1e400], [None, 1]]
)
def test_a_wrong_range_is_named(server: ServerProcess, given: Any) -> None:
    body = json.dumps({"task_type": "idle", "group_size": 2, "reward_range": given}).replace("Infinity", "1e400")
    error = assert_error(server.client.post("/v1/runs", content=body), 422, "invalid_input", "reward_range")
    assert "[low, high]" in error["message"]


@pytest.mark.parametrize(("name", "hooks"), [("plain", ""), ("own", OWN_VALIDITY), ("wrapped", WRAPPED_FILTER)])
def test_filter_and_normalisation_follow_the_range_wherever_they_are_asked(
    server: ServerProcess, name: str, hooks: str
) -> None:
    task_type = with_hooks(server, name, hooks)
    run = server.start_run(task_type, reward_range=[-1, 1], min_valid_item_size_ratio=0.5)
    run.write(*make_group("a", [-1.0, 1.0, 5.0, -1.5]), *make_group("b", [-1.0, 1.0, 1.0, -1.0]))
    batch = run.take(num_groups=2, wait_s=20)
    assert raw_rewards(batch) == [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0]
    assert [row["reward"] for row in batch["data"]] == pytest.approx([-1, 1] * 2 + [-1, 1, 1, -1], abs=1e-6)
    wide = server.start_run(task_type)
    wide.write(*make_group("a", [-100.0, 1e300, 5.0, -1.5]))
    assert raw_rewards(wide.take(num_groups=1, wait_s=20)) == [-100.0, 1e300, 5.0, -1.5]
    run.stop()
    wide.stop()


@pytest.mark.parametrize("normaliser", ["grpo", "rloo", "dr_grpo"])
def test_rewards_near_the_end_of_float64_stay_finite(server: ServerProcess, normaliser: str) -> None:
    run = server.start_run(normaliser=normaliser)
    run.write(*make_group("a", [1.7e308, -1.7e308, -1.7e308, 1.0]), *make_group("b", [1e15, 1e15 + 1, 1e15, 1e15]))
    rewards = [row["reward"] for row in run.take(num_groups=2)["data"]]
    assert rewards[0] > 0 > rewards[1] == rewards[2]
    assert rewards[5] > 0 > rewards[4]
    run.stop()


def test_a_restart_keeps_the_range(make_server: MakeServer) -> None:
    server = make_server()
    wide, narrow = server.start_slime("wide", reward_range=None), server.start_run(reward_range=[0, 1])
    server.kill9()
    server.restart()
    assert (shown_range(wide), shown_range(narrow)) == (None, [0.0, 1.0])
    wide.write(*make_group("a", SIGNS))
    assert raw_rewards(wide.take(num_groups=1, wait_s=20)) == SIGNS


# --- true and false


def write_lines(run: NativeRun, *samples: Json) -> None:
    body = b"".join(json.dumps(sample).encode() + b"\n" for sample in samples)
    run.client.post(f"{run.path}/samples", content=body, headers=NDJSON).raise_for_status()


def write_compressed(run: NativeRun, *samples: Json) -> None:
    body = gzip.compress(json.dumps(samples).encode())
    run.client.post(f"{run.path}/samples", content=body, headers=GZIP).raise_for_status()


def write_singly(run: NativeRun, *samples: Json) -> None:
    for sample in samples:
        run.client.post(f"{run.path}/samples", json=sample).raise_for_status()


def write_by_a_writer(run: NativeRun, *samples: Json) -> None:
    run.send(samples)


def write_in_slimes_way(run: NativeRun, *samples: Json) -> None:
    for sample in samples:
        run.client.post("/s/bools/buffer/write", json=sample).raise_for_status()


@pytest.mark.parametrize(
    "write",
    [NativeRun.write, write_lines, write_compressed, write_singly, write_binary, write_by_a_writer],
)
@pytest.mark.parametrize("contract", ["A", "B"])
def test_true_and_false_are_one_and_nought_on_every_route(
    server: ServerProcess, write: Callable[..., object], contract: str
) -> None:
    run = server.start_run(group_size=2, contract=contract)
    write(run, *token_group("a", rewards=(True, False)))
    rows = run.read(num_groups=1)["data"]
    name = "reward" if contract == "B" else "raw_reward"
    assert [(row[name], type(row[name])) for row in rows] == [(1.0, float), (0.0, float)]
    assert all(type(row["reward"]) is float for row in rows)
    assert run.view()["samples"]["member"] == 2
    run.stop()


def test_true_and_false_are_numbers_over_slimes_routes(server: ServerProcess) -> None:
    run = server.start_slime("bools", group_size=2)
    write_in_slimes_way(run, *make_group("a", [True, False]))
    peeked = run.client.get("/s/bools/buffer/peek").json()["data"]["data"]
    assert [(item["reward"], type(item["reward"])) for item in peeked] == [(1.0, float), (0.0, float)]
    rows = run.fetch()["data"]["data"]
    assert [(row["raw_reward"], type(row["raw_reward"])) for row in rows] == [(1.0, float), (0.0, float)]
    run.stop()


def test_true_and_false_are_numbers_in_tensors(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    write_binary(run, *token_group("a", rewards=(True, False)))
    tensors, _ = read_tensors(run, num_groups=1)
    assert tensors["raw_rewards"].tolist() == [1.0, 0.0]
    run.stop()


def test_hooks_see_numbers_and_their_answers_of_true_are_numbers(server: ServerProcess) -> None:
    doubtful = SEES_TYPES + "def normalize_group_data(group):\n"
    doubtful += "    return group[0], [item | {'reward': item['reward'] > 0.5} for item in group[1]]\n"
    run = server.start_run(with_hooks(server, "sees_types", doubtful), group_size=2)
    run.write(*make_group("a", [True, False]))
    rows = run.read(num_groups=1, wait_s=20)["data"]
    assert [(row["reward"], type(row["reward"])) for row in rows] == [(1.0, float), (0.0, float)]
    run.stop()


async def test_true_of_a_reward_function_is_one(server: ServerProcess, tmp_path: Path) -> None:
    write_generator(server.generators, JUDGED, "judged_generator.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "label": "odd"}\n{"prompt": "q", "label": "even"}\n')
    async with ScriptedEngine(lambda _: "yes") as engine:

        def data_of_a_run() -> list[Json]:
            payload = {"contract": "B", "input_file": str(rows), "remote_engine_url": f"{engine.url}/v1"}
            run = server.start_run("judged", group_size=1, **payload)
            data: list[Json] = run.take(num_groups=2, wait_s=30)["data"]
            return data

        data = await asyncio.to_thread(data_of_a_run)
    assert sorted((row["instance_id"], row["reward"]) for row in data) == [(0, 1.0), (1, 0.0)]
