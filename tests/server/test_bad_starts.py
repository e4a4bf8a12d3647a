"""What a bad start gets, over HTTP: a 4xx that names the field, and no run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess, assert_error, poll_until, run_ids, write_generator


def start_body(**changes: Any) -> dict[str, Any]:
    body = {"task_type": "idle", "num_repeat_per_sample": "4"} | changes
    return {name: value for name, value in body.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"task_type": ...}, "task_type"),
        ({"task_type": 7}, "task_type"),
        ({"num_repeat_per_sample": ...}, "num_repeat_per_sample"),
        ({"num_repeat_per_sample": "0"}, "num_repeat_per_sample"),
        ({"num_repeat_per_sample": "eight"}, "num_repeat_per_sample"),
        ({"num_repeat_per_sample": 2.5}, "num_repeat_per_sample"),
        ({"min_valid_group_size_ratio": 1.5}, "min_valid_group_size_ratio"),
        ({"min_valid_item_size_ratio": "-0.1"}, "min_valid_item_size_ratio"),
        ({"min_timeout_group_size_ratio": float(2)}, "min_timeout_group_size_ratio"),
        ({"group_timeout_seconds": 0}, "group_timeout_seconds"),
        ({"group_timeout_seconds": "soon"}, "group_timeout_seconds"),
        ({"max_buffer_size": 0}, "max_buffer_size"),
        ({"contract": "C"}, "contract"),
        ({"input_file": 3}, "input_file"),
        ({"capture": "yes"}, "capture"),
        ({"skip_instance_ids": "task-1"}, "skip_instance_ids"),
        ({"skip_instance_ids": [None]}, "skip_instance_ids"),
    ],
)
def test_a_start_with_a_wrong_parameter_is_refused_and_names_it(
    server: ServerProcess, changes: dict[str, Any], field: str
) -> None:
    before = run_ids(server)
    for path in ("/s/wrong/start_rollout", "/v1/runs"):
        assert_error(server.client.post(path, json=start_body(**changes)), 422, "invalid_input", field)
    assert run_ids(server) == before


def test_an_unknown_task_type_is_a_400_that_lists_the_known_ones(server: ServerProcess) -> None:
    for path in ("/s/wrong/start_rollout", "/v1/runs"):
        answer = server.client.post(path, json=start_body(task_type="mathh"))
        error = assert_error(answer, 400, "unknown_task_type", "task_type")
        assert "known task types: " in error["message"]
        assert "idle" in error["message"]


def test_an_unreadable_input_file_is_a_400(server: ServerProcess, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        answer = server.client.post("/start_rollout", json=start_body(input_file=str(path)))
        assert_error(answer, 400, "input_refused", "input_file")


BASE_TASK = """
from forebay.generators.base import BaseGenerator
TASK_TYPE = "rows"
def run_rollout(data):
    __import__("threading").Event().wait()
"""


@pytest.fixture(scope="module")
def rows_server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, BASE_TASK, "rows_generator.py")
    return module_servers(generators=folder, start_wait_s=60)


def write_rows(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def row(number: int) -> str:
    return json.dumps({"instance_id": number, "prompt": [{"role": "user", "content": "?"}], "label": "1"})


@pytest.mark.parametrize("num_process", ["many", 0, "-1", [8]])
def test_a_wrong_number_of_places_is_a_422_of_the_start(
    rows_server: ServerProcess, tmp_path: Path, num_process: Any
) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row(0)])
    body = start_body(task_type="rows", input_file=path, num_process=num_process)
    assert_error(rows_server.client.post("/start_rollout", json=body), 422, "invalid_input", "num_process")


@pytest.mark.parametrize("budgets", [{"engine": 1}, {"judge_failure": -1}, 3])
def test_wrong_retry_budgets_are_a_422_of_the_start(rows_server: ServerProcess, tmp_path: Path, budgets: Any) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row(0)])
    body = start_body(task_type="rows", input_file=path, retry_budgets=budgets)
    error = assert_error(rows_server.client.post("/start_rollout", json=body), 422, "invalid_input", "retry_budgets")
    assert "engine_failure" in error["message"]


@pytest.mark.parametrize(
    "urls", ["localhost:30000", "http://", "http://host:port", "ftp://host", ["http://a:1", "b:2"]]
)
def test_an_engine_address_that_is_none_is_a_422_of_the_start(
    rows_server: ServerProcess, tmp_path: Path, urls: str | list[str]
) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row(0)])
    body = start_body(task_type="rows", input_file=path, remote_engine_url=urls)
    error = assert_error(
        rows_server.client.post("/start_rollout", json=body), 422, "invalid_input", "remote_engine_url"
    )
    assert "http://127.0.0.1:30000" in error["hint"]


@pytest.mark.parametrize("bad", ["{", "[1]", "7", '{"label": "1"}', '{"prompt": 5}'])
def test_a_malformed_line_among_the_first_is_a_400_with_its_number(
    rows_server: ServerProcess, tmp_path: Path, bad: str
) -> None:
    path = write_rows(tmp_path / "in.jsonl", [row(0), row(1), bad, row(3)])
    answer = rows_server.client.post("/start_rollout", json=start_body(task_type="rows", input_file=path))
    error = assert_error(answer, 400, "input_refused", "input_file")
    assert "line 3" in error["message"]


def test_a_malformed_line_far_into_the_file_fails_the_run_with_its_number(
    rows_server: ServerProcess, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "in.jsonl", [*map(row, range(1_500)), "{"])
    run = rows_server.start_run("rows", input_file=path)
    assert "line 1501" in run.wait_for_state("failed")["reason"]


def test_a_server_tells_at_its_start_which_generators_cannot_be_used(make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path / "tasks", "def run_rollout(", "unfinished_generator.py")
    server = make_server(generators=tmp_path / "tasks")
    told = poll_until(lambda: [line for line in server.log().splitlines() if "unfinished_generator.py" in line])
    assert "cannot be used: SyntaxError" in told[0]
