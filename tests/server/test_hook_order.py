"""The order in which a read asks the five hooks, and what generators started over slime's routes find in their data."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import IDLE, Json, ServerProcess, SlimeRun, make_group, poll_until, write_generator

GOOD = [0.0, 1.0]
EQUAL = [0.5, 0.5]

RECORDER = """
import json, os

def note(hook, *about):
    with open(PATH, "a") as file:
        file.write(json.dumps([hook, *about]) + "\\n")

def get_group_data_meta_info(temp_data):
    note("meta", sorted(temp_data), sum(map(len, temp_data.values())))
    return {"num_told": sum(map(len, temp_data.values()))}

def is_valid_group(group, min_valid_group_size, task_type):
    note("valid", group[0])
    rewards = [item["reward"] for item in group[1]]
    is_finished = len(rewards) >= min_valid_group_size
    return is_finished and len(set(rewards)) > 1, is_finished

def filter_item(item, task_type):
    note("filter", item["instance_id"])
    return item["reward"] >= 0

def normalize_group_data(group):
    note("normalize", group[0])
    return group

def pad_group_data(group, group_size):
    note("pad", group[0])
    return group
"""

SHOWS_DATA = """
import json
TASK_TYPE = "shows_data"
def run_rollout(data):
    with open(data["shown_in"] + ".part", "w") as file:
        json.dump(data, file)
    import os
    os.rename(data["shown_in"] + ".part", data["shown_in"])
    import threading
    threading.Event().wait()
"""

PASSES = """
from forebay.generators.base import BaseGenerator
TASK_TYPE = "passes"
async def rollout_func(client, messages, sampling_params):
    raise AssertionError("no engine is there to be asked")
def reward_func(item):
    return 0.0
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], rollout_func, reward_func, data.get("num_epoch", 1))
"""


class Recorder:
    """A run whose generator notes each hook that it is asked."""

    def __init__(self, server: ServerProcess, folder: Path, **payload: Any) -> None:
        self._path = folder / "asked.jsonl"
        source = IDLE.replace('"idle"', '"recorder"') + RECORDER.replace("PATH", repr(str(self._path)))
        write_generator(server.generators, source, "recorder_generator.py")
        self.run: SlimeRun = server.start_slime("recorder", "recorder", group_size=2, **payload)

    def asked(self) -> list[Any]:
        """What was asked since this was called last."""
        if not self._path.exists():
            return []
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        self._path.unlink()
        return lines


@pytest.fixture
def recorder(server: ServerProcess, tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(server, tmp_path)
    yield recorder
    recorder.run.stop()


def hooks_of(asked: list[Any]) -> list[str]:
    return [hook for hook, *_ in asked]


def test_meta_information_comes_before_filter_normalisation_and_padding(recorder: Recorder) -> None:
    recorder.run.write(*make_group("a", GOOD))
    answer = recorder.run.fetch()
    assert answer["data"]["meta_info"]["num_told"] == 2
    asked = recorder.asked()
    assert hooks_of(asked) == ["valid", "meta", "filter", "filter", "normalize", "pad"]
    assert asked[1] == ["meta", ["a"], 2]


def test_a_read_of_several_groups_asks_it_once(recorder: Recorder) -> None:
    recorder.run.write(*make_group("a", GOOD), *make_group("b", EQUAL), *make_group("c", GOOD), *make_group("d", [1.0]))
    assert len(recorder.run.fetch()["data"]["data"]) == 4
    hooks = hooks_of(recorder.asked())
    assert hooks.count("meta") == 1
    assert hooks.index("meta") < min(map(hooks.index, ("filter", "normalize", "pad")))
    assert hooks[: hooks.index("meta")] == ["valid"] * hooks.index("meta")


def test_polls_that_find_no_valid_group_never_ask_it(recorder: Recorder) -> None:
    assert recorder.run.fetch()["success"] is False
    recorder.run.write(*make_group("short", [1.0]), *make_group("equal", EQUAL))
    for _ in range(3):
        assert recorder.run.fetch()["success"] is False
    recorder.run.write(*make_group("good", GOOD))
    assert recorder.run.fetch(batch_size=100)["success"] is False
    assert set(hooks_of(recorder.asked())) == {"valid"}
    assert recorder.run.fetch()["data"]["meta_info"]["num_told"] == 5
    assert recorder.run.fetch()["success"] is False
    assert hooks_of(recorder.asked()) == ["meta", "filter", "filter", "normalize", "pad"]


def test_a_read_whose_groups_the_filter_takes_asks_it_once_and_consumes_nothing(recorder: Recorder) -> None:
    recorder.run.write(*make_group("a", [-1.0, -2.0]))
    assert recorder.run.fetch()["success"] is False
    assert hooks_of(recorder.asked()) == ["valid", "meta", "filter", "filter"]
    recorder.run.write(*make_group("b", GOOD))
    assert recorder.run.fetch()["data"]["meta_info"]["num_told"] == 4
    assert [about for hook, *about in recorder.asked() if hook == "meta"] == [[["a", "b"], 4]]


def test_a_read_that_waits_asks_it_once(recorder: Recorder) -> None:
    run = recorder.run
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(run.read, batch_size=4, wait_s=20)
        run.write(*make_group("a", GOOD))
        poll_until(lambda: [group for group in run.groups(state="ready") if group["instance_id"] == "a"])
        run.write(*make_group("b", GOOD))
        batch = reading.result()
    assert len(batch["data"]) == 4
    hooks = hooks_of(recorder.asked())
    assert (hooks.count("meta"), hooks.count("filter")) == (1, 4)
    again = run.write(*make_group("c", GOOD)) and run.read(num_groups=1)
    assert batch["meta_info"]["num_told"] + again["meta_info"]["num_told"] == 6, "each sample is told of once"


def test_a_repeated_request_gets_the_same_and_asks_nobody(recorder: Recorder) -> None:
    recorder.run.write(*make_group("a", GOOD))
    first, second = (recorder.run.read(num_groups=1, request_id="r") for _ in range(2))
    assert first["meta_info"] == second["meta_info"]
    assert hooks_of(recorder.asked()).count("meta") == 1


def test_what_a_reader_that_goes_away_was_told_of_is_told_again(recorder: Recorder) -> None:
    recorder.run.write(*make_group("a", GOOD))
    batch = recorder.run.read(num_groups=1)
    recorder.run.release(batch)
    assert recorder.run.read(num_groups=1)["meta_info"]["num_told"] == 2


# --- the data


def data_of(server: ServerProcess, folder: Path, start: str, **payload: Any) -> Json:
    """What `run_rollout` is given by a start of this kind."""
    write_generator(server.generators, SHOWS_DATA, "shows_data_generator.py")
    shown = folder / f"{start}-{len(list(folder.iterdir()))}.json"
    begin = server.start_slime if start == "slime" else server.start_run
    name = {"name": "data"} if start == "slime" else {}
    run = begin(**name, task_type="shows_data", shown_in=str(shown), **payload)
    poll_until(shown.exists)
    run.stop()
    data: Json = json.loads(shown.read_text())
    return data


DEFAULTS = {
    "num_epoch": 10,
    "min_valid_group_size_ratio": 1.0,
    "min_valid_item_size_ratio": 0.7,
    "group_timeout_seconds": 300.0,
    "min_timeout_group_size_ratio": 0.7,
    "max_buffer_size": 1_000_000_000,
}


def test_slimes_defaults_stand_in_the_data_of_its_starts_alone(server: ServerProcess, tmp_path: Path) -> None:
    data = data_of(server, tmp_path, "slime", sampling_params=None)
    assert {name: data[name] for name in DEFAULTS} == DEFAULTS
    assert "reward_range" not in data
    given = {"num_epoch": "3", "min_valid_item_size_ratio": "0.5"}
    data = data_of(server, tmp_path, "slime", **given, group_timeout_seconds=None)
    assert {name: data[name] for name in DEFAULTS} == DEFAULTS | given
    assert not DEFAULTS.keys() & data_of(server, tmp_path, "native").keys()


def test_a_start_repeated_with_the_default_written_out_is_the_same(server: ServerProcess) -> None:
    first = server.start_slime("again")
    assert server.start_slime("again").run_id == first.run_id
    assert server.start_slime("again", num_epoch=10).run_id == first.run_id
    assert server.start_slime("again", num_epoch="3").run_id != first.run_id


def test_ten_epochs_are_planned_and_listed_ids_skip_theirs(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    write_generator(server.generators, PASSES, "passes_generator.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instance_id": name, "prompt": "q"}) + "\n" for name in "abc"))
    known = {"task_type": "passes", "input_file": str(rows), "remote_engine_url": "http://127.0.0.1:9"}
    for listed, num_groups in (([], 30), (["a", "a", "b"], 27)):
        run = server.start_slime(f"ten-{num_groups}", **known, skip_instance_ids=listed)
        assert poll_until(lambda run=run: run.view()["num_groups_total"]) == num_groups
        run.stop()
    native = server.start_run(**known)
    assert poll_until(lambda: native.view()["num_groups_total"]) == 3
