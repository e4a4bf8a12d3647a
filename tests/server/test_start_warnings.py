"""Warnings about misspelt fields of a start: over HTTP, on the command line, and in Python."""

import json
import logging
from pathlib import Path

import pytest

from forebay.client import BufferClient
from tests.cli.conftest import Forebay, forebay  # noqa: F401 - a fixture
from tests.conftest import MakeServer
from tests.kit import IDLE, Json, NativeRun, ServerProcess, assert_error, poll_until, run_ids, write_generator

TYPO = "Forebay has no field 'max_tokns': did you mean 'max_tokens'?"


def start(server: ServerProcess, **fields: object) -> Json:
    reply = server.client.post("/v1/runs", json={"task_type": "idle", "group_size": 2, **fields})
    assert reply.status_code == 201, reply.text
    run = NativeRun(server, reply.json()["run_id"])
    # While a new file is inspected on a slow machine, there is nothing to say yet.
    view = poll_until(lambda: view if (view := run.view())["state"] != "validating" else {})
    run.stop()
    return view


def test_a_field_that_is_nearly_another_is_warned_of_and_travels_to_the_generator(server: ServerProcess) -> None:
    (server.generators / "echo_generator.py").write_text(
        'import json\nTASK_TYPE = "echo"\ndef run_rollout(data):\n    print(json.dumps(data), flush=True)\n'
    )
    run = server.start_run("echo", max_tokns=5)
    view = run.view()
    assert view["warnings"] == [TYPO]
    log = f"{run.path}/log"
    lines = poll_until(lambda: [line for line in server.client.get(log).json()["lines"] if "max_tokns" in line])
    assert json.loads(lines[0])["max_tokns"] == 5
    run.stop()
    assert f"run {run.run_id}: {TYPO}" in server.log()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("groupsize", "group_size"),
        ("num_epochs", "num_epoch"),
        ("group_timeout_s", "group_timeout_seconds"),
        ("top_p", "sampling_params.top_p"),
        ("temprature", "sampling_params.temperature"),
    ],
)
def test_the_nearest_field_is_named(server: ServerProcess, name: str, meant: str) -> None:
    assert start(server, **{name: 1})["warnings"] == [f"Forebay has no field {name!r}: did you mean {meant!r}?"]


def test_fields_that_are_known_and_those_like_no_other_are_not_worth_a_word(server: ServerProcess) -> None:
    known = {"max_tokens": 5, "num_epoch": 1, "group_timeout_seconds": 9, "tokenizer_path": "", "start_id": "warned-1"}
    assert start(server, **known, curriculum={"stage": 3})["warnings"] == []


def test_slimes_reply_has_warnings_only_where_there_are_any(server: ServerProcess) -> None:
    body = {"task_type": "idle", "num_repeat_per_sample": "2", "tokenizer_path": "", "num_process": "3"}
    plain = server.client.post("/s/warned/start_rollout", json=body).json()
    assert set(plain) == {"message", "run_id", "state"}
    warned = server.client.post("/s/warned/start_rollout", json={**body, "max_tokns": "5"}).json()
    assert warned["warnings"] == [TYPO]
    assert set(warned) == {"message", "run_id", "state", "warnings"}
    NativeRun(server, warned["run_id"]).stop()


def test_warnings_outlive_the_server_and_end_with_the_next_start(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(max_tokns=5)
    server.stop()
    server.restart()
    assert run.view()["warnings"] == [TYPO]
    body = {"task_type": "idle", "group_size": 4, "run_id": run.run_id}
    assert server.client.post("/v1/runs", json=body).json()["warnings"] == []
    run.stop()


def test_the_command_line_writes_them_beside_the_id(
    forebay: Forebay,  # noqa: F811 - the fixture
    server: ServerProcess,
) -> None:
    given = ["start", "--task-type", "idle", "--group-size", "2", "--set", "max_tokns=5"]
    outcome = forebay(*given, "--url", server.url)
    run_id = outcome.out.strip()
    assert outcome.err == f"warning: {TYPO}\n"
    assert TYPO in forebay("status", run_id, "--url", server.url).out
    forebay("stop", run_id, "--url", server.url)


def test_the_client_for_trainers_logs_them(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    with BufferClient(server.url) as client, caplog.at_level(logging.WARNING, "forebay"):
        stats = client.start(task_type="idle", group_size=2, max_tokns=5)
    assert stats.warnings == [TYPO]
    assert f"{stats.run_id}: {TYPO}" in caplog.text
    NativeRun(server, stats.run_id).stop()


def test_a_missing_input_file_is_told_with_the_flag(server: ServerProcess) -> None:
    error = assert_error(
        server.client.post("/v1/runs", json={"task_type": "math", "group_size": 2}), 400, "input_refused", "input_file"
    )
    assert "--input-file" in error["hint"]


@pytest.mark.parametrize("task_type", ["math", "tool"])
@pytest.mark.parametrize("engine", [{}, {"remote_engine_url": ""}, {"remote_engine_url": []}])
def test_a_built_in_task_without_an_engine_is_a_422_that_names_the_flag(
    server: ServerProcess, tmp_path: Path, task_type: str, engine: Json
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    before = run_ids(server)
    body = {"task_type": task_type, "num_repeat_per_sample": "2", "input_file": str(rows), **engine}
    for path in ("/v1/runs", "/s/no-engine/start_rollout"):
        error = assert_error(server.client.post(path, json=body), 422, "invalid_input", "remote_engine_url")
        assert f"task type {task_type!r} needs an engine" in error["message"]
        assert "--engine-url" in error["hint"]
        assert "remote_engine_url" in error["hint"]
    assert run_ids(server) == before


def test_the_command_line_shows_the_flag_that_is_missing(
    forebay: Forebay,  # noqa: F811 - the fixture
    server: ServerProcess,
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    given = ["--task-type", "math", "--group-size", "2", "--input-file", str(rows), "--url", server.url]
    outcome = forebay("start", *given)
    assert (outcome.code, outcome.out) == (1, "")
    assert "task type 'math' needs an engine" in outcome.err
    assert "hint: forebay start --engine-url" in outcome.err


def test_a_file_that_replaces_a_built_in_task_starts_without_an_engine(make_server: MakeServer) -> None:
    server = make_server()
    write_generator(server.generators, IDLE.replace("idle", "math"), "math_generator.py")
    server.start_run("math").stop()
