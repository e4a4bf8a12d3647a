"""Agents, functions and programs, run by a real server over its gateway."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from forebay.core.errors import InvalidInput
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from forebay.generators.agents.gateway import GatewayLink
from forebay.server.cli.command_line import app as cli
from tests.conftest import MakeServer
from tests.generators.agent_kit import LIMIT_S, Samples, start, stored
from tests.kit import NativeRun, ServerProcess, assert_error, children_with, poll_until

Json = dict[str, Any]

FUNCTIONS: list[Json] = [
    {"do": "answer", "label": "0.25"},
    {"do": "talk", "label": "1"},
    {"do": "consult", "label": "0.5"},
    {"do": "compact", "label": "0.5"},
    {"do": "shrug", "label": "0"},
    {"do": "crash", "label": "1"},
    {"do": "crash_silently", "label": "1"},
    {"do": "leave", "label": "1"},
    {"do": "break_world", "label": "1"},
    {"do": "return_nonsense", "label": "1"},
    {"do": "answer", "prompt": "engine down", "instance_id": "down", "label": "1"},
    {"do": "answer", "prompt": "too long", "instance_id": "refused", "label": "1"},
    {"do": "answer", "instance_id": "unjudged", "label": "none"},
]
PROGRAMS: list[Json] = [
    {"do": "answer", "label": 0.5},
    {"do": "fail", "label": 1},
    {"do": "break_judge", "label": 1},
    {"do": "mumble", "label": 1},
]
HANGING: Json = {"do": "hang", "label": 1}
WALL_S = 30
"""For an agent that hangs; it needs some of it to start on a busy machine."""


def script(call: ScriptedCall) -> Reply | str:
    if call.prompt == "hang once" and "-00-" in (call.rid or ""):
        return Reply(hang=True)
    errors = {"engine down": (500, "out of memory"), "too long": (400, "the prompt is too long")}
    if call.prompt in errors:
        status, told = errors[call.prompt]
        return Reply(text=told, error_status=status)
    return f"Answer to {call.prompt}"


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(script).in_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Path:
    return Path(shutil.copytree(Path(__file__).parent / "agent_tasks", folder / "tasks"))


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tasks: Path) -> ServerProcess:
    return module_servers(generators=tasks, start_wait_s=60, env={"FOREBAY_SECRET": "of the cluster"})


@pytest.fixture(scope="module")
def runs(server: ServerProcess, engine: ThreadedEngine, folder: Path) -> dict[str, NativeRun]:
    """All runs, started at once: what takes long is the start of their processes."""

    def run(task_type: str, rows: list[Json], **payload: Any) -> NativeRun:
        return start(server, folder, task_type, engine.url, rows, max_attempts=1, tell=str(folder), **payload)

    return {
        "hanging": run("commands", [HANGING], wall_s=WALL_S),
        "functions": run("functions", FUNCTIONS),
        "programs": run("commands", PROGRAMS),
        "blocking": run("functions", FUNCTIONS[:1], blocking=True),
    }


@pytest.fixture(scope="module")
def functions(runs: dict[str, NativeRun]) -> Samples:
    return stored(runs["functions"])


@pytest.fixture(scope="module")
def programs(runs: dict[str, NativeRun]) -> Samples:
    return stored(runs["programs"])


def test_an_agent_is_recorded_and_rewarded(functions: Samples) -> None:
    (sample,) = functions["answer"]
    assert (sample["reward"], sample["outcome"]) == (0.25, "ok")
    assert [message["role"] for message in sample["messages"]] == ["user", "assistant"]
    assert sum(sample["loss_mask"]) > 0
    assert len(sample["tokens"]) == len(sample["loss_mask"]) == len(sample["logprobs"])
    assert sample["extra_info"]["agent"]["num_calls"] == 1
    assert sample["for_reward"]["agent"].keys() == {"output", "wall_s"}, "the folder is gone"


def test_the_sampling_parameters_of_the_run_hold(functions: Samples, engine: ThreadedEngine) -> None:
    asked = {(call.body["max_tokens"], call.body["temperature"]) for call in engine.calls}
    assert functions
    assert asked == {(64, 0.5)}


def test_turns_of_one_talk_are_one_sample(functions: Samples) -> None:
    (sample,) = functions["talk"]
    assert [message["role"] for message in sample["messages"]] == ["user", "assistant", "user", "assistant"]
    assert sample["extra_info"]["agent"]["num_calls"] == 2


def test_an_agent_within_an_agent_is_a_sample_of_its_own(functions: Samples) -> None:
    main, fork = sorted(functions["consult"], key=lambda sample: sample.get("fork", 0))
    assert fork["messages"][0]["content"] == "You are another one."
    assert [message["role"] for message in main["messages"]] == ["user", "assistant", "user", "assistant"]
    assert fork["rollout_id"] == main["rollout_id"]
    assert fork["reward"] == main["reward"] == 0.5


def test_a_history_that_is_cut_short_begins_another_sample(functions: Samples) -> None:
    main, fork = sorted(functions["compact"], key=lambda sample: sample.get("fork", 0))
    assert len(fork["messages"]) == 4
    assert main["messages"][0]["content"].startswith("So far: ")
    assert fork["rollout_id"] == main["rollout_id"]


@pytest.mark.parametrize(
    ("name", "outcome", "told"),
    [
        ("crash", "agent_failure", "ValueError('out of ideas')"),
        ("crash_silently", "agent_failure", "made no call"),
        ("leave", "agent_failure", "SystemExit('enough')"),
        ("break_world", "environment_failure", "the simulator is gone"),
        ("return_nonsense", "agent_failure", "is not a JSON value"),
        ("down", "engine_failure", "out of memory"),
        ("shrug", "engine_failure", "out of memory"),
        ("refused", "agent_failure", "the prompt is too long"),
        ("unjudged", "judge_failure", "could not convert string to float"),
    ],
)
def test_each_failure_is_told_apart_and_is_no_reward(functions: Samples, name: str, outcome: str, told: str) -> None:
    (sample,) = functions[name]
    assert (sample["status"], sample["outcome"]) == ("failed", outcome)
    assert "reward" not in sample
    assert told in sample["error"]["message"]


def test_a_blocking_agent_runs_in_a_thread(runs: dict[str, NativeRun]) -> None:
    ((sample,),) = stored(runs["blocking"]).values()
    assert (sample["reward"], sample["outcome"]) == (0.25, "ok")


def test_a_program_finds_its_address_and_is_verified(programs: Samples) -> None:
    (sample,) = programs["answer"]
    assert (sample["reward"], sample["outcome"]) == (0.5, "ok")
    assert sample["messages"][-1]["content"] == "Answer to Do answer."
    assert sum(sample["loss_mask"]) > 0


def test_the_end_of_what_a_program_printed_is_kept(
    runs: dict[str, NativeRun], programs: Samples, server: ServerProcess
) -> None:
    (sample,), (failed,) = programs["answer"], programs["fail"]
    assert sample["outcome"] == "ok"
    run = runs["programs"]
    printed = run.client.get(f"{run.path}/log", params={"uid": sample["uid"]}).json()["lines"]
    assert (printed[-1], set(printed[1:-1])) == ("Answer to Do answer.", {"thinking"})
    assert 900 < len("\n".join(printed)) < 1_000, "its limit, output_bytes"
    assert "thinking" not in json.dumps(sample), "samples are none the larger for it"
    told = run.client.get(f"{run.path}/log", params={"uid": failed["uid"], "lines": 2}).json()["lines"]
    assert set(told) == {"Answer to Do fail.", "lost the thread"}, "in the order of its flushes"
    shown = CliRunner().invoke(cli, ["status", run.run_id, "--agent", sample["uid"], "--log", "2", "--url", server.url])
    assert shown.stdout.splitlines() == ["thinking", "Answer to Do answer."]
    for uid in ("nobody", "../../run", ""):
        assert_error(run.client.get(f"{run.path}/log", params={"uid": uid}), 422, "invalid_input", "uid")


@pytest.mark.parametrize(
    ("name", "outcome", "told"),
    [
        ("fail", "agent_failure", "ended with status 1: lost the thread"),
        ("break_judge", "judge_failure", "ValueError: the verifier is broken"),
        ("mumble", "judge_failure", "must be a number or an object with a reward (got 'perhaps')"),
    ],
)
def test_a_program_that_fails_is_told_apart(programs: Samples, name: str, outcome: str, told: str) -> None:
    (sample,) = programs[name]
    assert (sample["status"], sample["outcome"]) == ("failed", outcome)
    assert told in sample["error"]["message"]


def alive(told: Path) -> list[int]:
    return [pid for pid in map(int, told.read_text().split()) if psutil.pid_exists(pid)]


def test_a_program_that_took_too_long_is_gone_with_all_that_it_started(
    runs: dict[str, NativeRun], folder: Path
) -> None:
    ((sample,),) = stored(runs["hanging"]).values()
    assert sample["outcome"] == "agent_failure"
    assert f"was killed after {WALL_S}" in sample["error"]["message"]
    assert alive(folder / "pids") == []


@pytest.fixture
def hanging(server: ServerProcess, engine: ThreadedEngine, tmp_path: Path) -> Callable[..., tuple[NativeRun, Path]]:
    """Starts a run of a program that hangs, with a child in another session; where their pids are."""

    def start_one(on: ServerProcess = server, **payload: Any) -> tuple[NativeRun, Path]:
        run = start(on, tmp_path, "commands", engine.url, [HANGING], tell=str(tmp_path), **payload)
        poll_until((tmp_path / "pids").exists, LIMIT_S)
        assert len(alive(tmp_path / "pids")) == 2
        return run, tmp_path / "pids"

    return start_one


def test_a_closed_group_kills_its_agent(hanging) -> None:
    run, told = hanging(group_deadline_seconds=30, group_timeout_seconds=30)
    run.closed()
    poll_until(lambda: not alive(told))
    assert run.view()["state"] != "failed"


def test_a_stopped_run_kills_its_agents(hanging) -> None:
    run, told = hanging()
    run.stop()
    poll_until(lambda: not alive(told))


def test_a_gateway_that_is_killed_costs_an_attempt(
    server: ServerProcess, engine: ThreadedEngine, functions: Samples, tmp_path: Path
) -> None:
    assert functions, "the other rollouts are over"
    rows: list[Json] = [{"do": "answer", "prompt": "hang once", "label": 1}]
    run = start(server, tmp_path, "functions", engine.url, rows, max_attempts=2)
    poll_until(lambda: engine.in_flight, LIMIT_S)
    (gateway,) = children_with(server.pid, "forebay.gateway")
    gateway.kill()
    ((sample,),) = stored(run).values()
    assert (sample["reward"], sample["attempt"]) == (1.0, 1)


@pytest.mark.soak
def test_agents_end_with_a_killed_server(hanging, make_server: MakeServer, tasks: Path) -> None:
    server = make_server(generators=tasks, start_wait_s=60)
    _, told = hanging(server)
    server.kill9()
    poll_until(lambda: not alive(told))


async def test_agents_need_a_forebay_server(buffer) -> None:
    with pytest.raises(InvalidInput, match="agents need the gateway of a Forebay server"):
        GatewayLink(buffer.root_url)
