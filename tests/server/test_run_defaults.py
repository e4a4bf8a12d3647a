"""Defaults of runs at the server, by task type."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Forebay, forebay  # noqa: F401 - a fixture
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_group, poll_until, write_generator

TELLING = """
import json, pathlib, threading
TASK_TYPE = "telling"
def run_rollout(data):
    pathlib.Path(data["tell"]).write_text(json.dumps(data))
    threading.Event().wait()
"""
DEFAULTS = """
[run_defaults.telling]
group_timeout_seconds = 44
keep_checkpoints = 7
num_process = 3
reward_range = [-1, 1]
sampling_params = { temperature = 0.5, max_tokens = 9 }

[run_defaults.idle]
group_size = 6
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "forebay.toml"
    path.write_text(DEFAULTS)
    return path


@pytest.fixture
def server(make_server: MakeServer, config: Path, tmp_path: Path) -> ServerProcess:
    write_generator(tmp_path / "tasks", TELLING, "telling_generator.py")
    return make_server(generators=tmp_path / "tasks", config=config)


def told(path: Path) -> Json:
    """What ``run_rollout`` was given."""
    data: Json = json.loads(poll_until(lambda: path.exists() and path.read_text()))
    return data


def test_a_replay_has_the_settings_of_its_source_and_no_later_defaults(
    server: ServerProcess, config: Path, tmp_path: Path
) -> None:
    recorded = server.start_run("idle", 2)
    recorded.write(*make_group("a", [0.0, 1.0]))
    recorded.stop()
    config.write_text(DEFAULTS + "min_valid_group_size_ratio = 0.5\nsampling_params = { temperature = 0.1 }\n")
    server.stop()
    server.restart()
    reply = server.client.post("/v1/runs", json={"replay": recorded.run_id})
    assert reply.is_success, reply.text
    view = reply.json()
    assert (view["settings"]["min_valid_group_size_ratio"], view["run_defaults"]) == (1.0, {})
    assert view["settings"]["group_size"] == 2
    assert server.start_run("idle", 2).view()["settings"]["min_valid_group_size_ratio"] == 0.5


def test_the_command_line_leaves_the_group_size_to_them(
    forebay: Forebay,  # noqa: F811 - the fixture
    server: ServerProcess,
) -> None:
    outcome = forebay("start", "--task-type", "idle", "--url", server.url)
    assert outcome.code == 0, outcome.err
    run = NativeRun(server, outcome.out.strip())
    assert run.view()["settings"]["group_size"] == 6
    run.stop()


@pytest.mark.parametrize("origin", ["slime", "native"])
def test_a_start_has_them_where_it_says_nothing(server: ServerProcess, tmp_path: Path, origin: str) -> None:
    start = server.start_slime if origin == "slime" else server.start_run
    path = tmp_path / "told"
    fields = {"tell": str(path), "keep_checkpoints": "2", "sampling_params": {"temperature": 1}}
    run = start(task_type="telling", group_size=2, **fields)
    settings = run.view()["settings"]
    assert (settings["group_timeout_seconds"], settings["keep_checkpoints"]) == (44, 2), "a start comes first"
    assert settings["reward_range"] == [-1, 1], "before slime's own default, too"
    data = told(path)
    assert (data["num_process"], data["group_timeout_seconds"]) == (3, 44)
    assert data["sampling_params"] == {"temperature": 1}, "as a whole"
    shown = {"group_timeout_seconds": 44, "num_process": 3, "reward_range": [-1, 1]}
    assert run.view()["run_defaults"] == shown


def test_null_in_a_start_comes_first_and_other_task_types_have_none(server: ServerProcess, tmp_path: Path) -> None:
    run = server.start_run("telling", 2, tell=str(tmp_path / "told"), reward_range=None)
    assert run.view()["settings"]["reward_range"] is None
    assert server.start_run("idle", 2).view()["settings"]["group_timeout_seconds"] == 300


def test_the_size_of_groups_may_be_a_default_under_either_name(server: ServerProcess) -> None:
    run_id = server.client.post("/v1/runs", json={"task_type": "idle"}).json()["run_id"]
    assert server.client.get(f"/v1/runs/{run_id}").json()["settings"]["group_size"] == 6
    assert server.start_slime("sized", "idle", 3).view()["settings"]["group_size"] == 3


def test_a_run_keeps_those_of_its_start(server: ServerProcess, config: Path, tmp_path: Path) -> None:
    run = server.start_slime("kept", "telling", 2, tell=str(tmp_path / "first"))
    told(tmp_path / "first")
    config.write_text(DEFAULTS.replace("44", "55").replace("num_process = 3", "num_process = 5"))
    server.stop()
    (tmp_path / "first").unlink()
    server.restart()
    assert run.view()["settings"]["group_timeout_seconds"] == 44
    assert told(tmp_path / "first")["num_process"] == 3
    assert run.view()["run_defaults"]["num_process"] == 3
    again = server.start_slime("kept", "telling", 2, tell=str(tmp_path / "first"))
    assert again.run_id != run.run_id, "with other defaults the same payload is another start"
    same = server.start_slime("kept", "telling", 2, tell=str(tmp_path / "first"))
    assert same.run_id == again.run_id
    assert same.view()["settings"]["group_timeout_seconds"] == 55


def test_status_shows_them(server: ServerProcess, tmp_path: Path) -> None:
    run = server.start_slime("shown", "telling", 2, tell=str(tmp_path / "told"))
    command = [sys.executable, "-m", "forebay.server.cli", "status", run.run_id, "--url", server.url]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "group_timeout_seconds=44" in shown
    assert "num_process=3" in shown


def test_capture_by_default_brings_tokens_through_the_gateway(make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path / "tasks", TELLING, "telling_generator.py")
    defaults = json.dumps({"telling": {"capture": True}})
    server = make_server(generators=tmp_path / "tasks", run_defaults=defaults)
    engine = "http://127.0.0.1:9"
    server.start_slime("", "telling", 2, tell=str(tmp_path / "told"), remote_engine_url=engine)
    data = told(tmp_path / "told")
    assert data["capture"] is True
    assert "/gateway/" in data["remote_engine_url"]


def test_a_task_type_that_no_generator_has_is_told_in_the_log(make_server: MakeServer) -> None:
    server = make_server(run_defaults='{"mth": {"capture": true}}')
    poll_until(lambda: "run_defaults has task types without a generator: mth" in server.log())


WRONG = [
    ("[run_defaults.math]\ncaptur = true", "captur is not a setting of a run: did you mean capture?"),
    ("[run_defaults.math]\nzzz = 1", "[run_defaults.math] zzz is not a setting of a run"),
    ("[run_defaults.math]\nrun_id = 'x'", "[run_defaults.math] run_id belongs to a single start"),
    ("[run_defaults.math]\ngroup_timeout_seconds = -1", "[run_defaults.math] group_timeout_seconds: "),
    ("[run_defaults.math]\nmin_valid_item_size_ratio = 2", "[run_defaults.math] min_valid_item_size_ratio: "),
    ("[run_defaults.math]\ncapture = 'perhaps'", "[run_defaults.math] capture: must be true or false"),
    ("[run_defaults.math]\nmax_tokens = 'many'", "[run_defaults.math] max_tokens: must be a whole number"),
    ("[run_defaults.math]\nnum_epoch = 0", "[run_defaults.math] num_epoch: must be at least 1"),
    ("[run_defaults.math]\nsampling_params = 3", "[run_defaults.math] sampling_params: "),
    ("[run_defaults.math]\nretry_budgets = { bad = 1 }", "[run_defaults.math] retry_budgets: "),
    ("[run_defaults.math]\nremote_engine_url = 'nowhere'", "remote_engine_url must be an HTTP address (got 'nowhere')"),
    ("[run_defaults.math]\ntemplate_path = 3", "[run_defaults.math] template_path must be a path"),
    ("[run_defaults.math]\noversampling = { groups = 3 }", "[run_defaults.math] oversampling"),
    ("[run_defaults.math]\nscheduler = { top = 3 }", "[run_defaults.math] scheduler.top: Input should be less than 1"),
    ("[run_defaults.math]\nscheduler = { policy = 'no' }", "[run_defaults.math] scheduler: there is no policy 'no'"),
    ("[run_defaults]\ncapture = true", "run_defaults.capture: "),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong_ends_the_server_with_file_table_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "forebay.toml"
    path.write_text(text)
    command = [sys.executable, "-m", "forebay.server.cli", "serve", "--port", "0", "--config", str(path)]
    ended = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert ended.returncode != 0
    said = " ".join(ended.stderr.split())
    assert message in said, said
    assert str(path) in said.replace(" ", "") or path.name in said, "the file is named"
