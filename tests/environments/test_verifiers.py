"""Tasksets of the real verifiers, run by a real server: single turn, tools over MCP, and a simulated user."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.conftest import MakeServer
from tests.engines.tiny.conftest import running_engine
from tests.environments.verifiers_kit import (
    GROUP_SIZE,
    LOCAL,
    PAGE,
    SUMS,
    copied_tasksets,
    runs_like_verifiers,
    samples_of,
    settings_of,
    variables_for,
)
from tests.generators.agent_kit import LIMIT_S, Json, stored
from tests.kit import NativeRun, ServerProcess, poll_until

pytestmark = pytest.mark.environments

COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ENVS: list[Json] = [
    SUMS,
    {"taskset": {"id": "forebay-orders"}, "agent": LOCAL},
    {"taskset": {"id": "forebay-talks"}, "id": "user-sim", "user": LOCAL, "assistant": LOCAL},
]
"""As verifiers itself takes them."""


def script(call: ScriptedCall) -> Reply | str:
    system, prompt = str(call.messages[0].get("content")), call.prompt
    if "role-playing a USER" in system:
        return "###DONE###" if len(call.messages) > 4 else f"I want something ({len(call.messages)})."
    if system == "You serve.":
        return "Here is some tea."
    if call.messages[-1]["role"] == "tool":
        return f"It has {prompt}"
    if (order := re.search(r"order (\d)\?", prompt)) is not None:
        (tool,) = call.body["tools"]
        call_up = {"name": tool["function"]["name"], "arguments": json.dumps({"number": int(order[1])})}
        return Reply(tool_calls=[{"id": "call-1", "type": "function", "function": call_up}])
    number = int(prompt.split()[2])
    if number == 3 and "-00-" in (call.rid or ""):
        return Reply(hang=True)
    return str(2 * number + call.number % 2)


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(script).in_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return variables_for(copied_tasksets(tmp_path_factory.mktemp("verifiers")))


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, environment_python: str, env: dict[str, str]) -> ServerProcess:
    return module_servers(environment_python=environment_python, env=env, max_restarts=0, start_wait_s=60)


@pytest.mark.timeout(800)  # four times it waits for what may take LIMIT_S
async def test_rewards_are_those_of_verifiers_and_tokens_those_of_the_engine(
    server: ServerProcess, engine: ThreadedEngine, environment_python: str, env: dict[str, str], tmp_path: Path
) -> None:
    with running_engine() as (_, tiny_url):
        engines = [tiny_url, engine.url, engine.url]
        told = await runs_like_verifiers(server, engines, ENVS, environment_python, env, tmp_path)
    sums, orders, talks = map(samples_of, told)
    assert [set(sample["reward_parts"]) for sample in sums] == [{"exact", "short"}] * 4
    assert [sample["reward"] for sample in orders] == [1.5] * 2
    roles = [[message["role"] for message in sample["messages"]] for sample in talks]
    assert roles == [["system", *["user", "assistant"] * 2]] * 2, "the calls of the simulated user are in no sample"


def test_a_rollout_whose_judge_or_process_fails_has_no_reward_and_the_next_attempt_has_a_new_process(
    server: ServerProcess, engine: ThreadedEngine
) -> None:
    settings = settings_of({"taskset": {"id": "forebay-failing"}})
    run = server.start_run(
        "verifiers", remote_engine_url=engine.url, select={"include": {"idx": [2, 3]}}, max_attempts=2, **settings
    )

    def hanging() -> list[ScriptedCall]:
        return [call for call in engine.calls if "3 + 3" in call.prompt and call.finished is None]

    poll_until(lambda: len(hanging()) == GROUP_SIZE, LIMIT_S)
    # What the child starts has its command line for a moment.
    found = [each for each, words in commands_below(server) if words[1:] and words[1].endswith("child_main.py")]
    (child,) = [each for each in found if each.parent() not in found]
    child.send_signal(signal.SIGKILL)
    groups = stored(run)
    assert [(sample["outcome"], sample.get("reward")) for sample in groups[2]] == [("judge_failure", None)] * 2
    assert "no answer is known" in groups[2][0]["error"]["message"]
    assert [sample["outcome"] for sample in groups[3]] == ["ok"] * 2
    assert all("-01-" in str(call.rid) for call in engine.calls if "3 + 3" in call.prompt and call.finished == "stop")
    assert not child.is_running()


def commands_below(server: ServerProcess) -> list[tuple[psutil.Process, list[str]]]:
    """What the server and its children have started, with its command line; harnesses come and go."""
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended since it was listed
            found.append((process, process.cmdline()))
    return found


def test_a_deadline_ends_the_rollout_in_verifiers(server: ServerProcess, engine: ThreadedEngine) -> None:
    settings = settings_of({"taskset": {"id": "my-sums"}})
    run = server.start_run(
        "verifiers",
        remote_engine_url=engine.url,
        select={"include": {"idx": [3]}},
        max_attempts=1,
        agent_timeout_s=5,
        **settings,
    )
    (group,) = stored(run).values()
    assert [sample["outcome"] for sample in group] == ["agent_failure"] * 2
    assert "took longer than 5 s" in group[0]["error"]["message"]
    poll_until(lambda: not [words for _, words in commands_below(server) if "--base-url" in " ".join(words)])


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({}, "taskset must name a taskset"),
        ({"taskset": "no-such"}, "taskset 'no-such' not found"),
        ({"taskset": "my-sums", "env": {"taskset": {"no_such": 1}}}, "no_such"),
        ({"taskset": "my-sums", "env": {"taskset": "foo"}}, "env.taskset must be an object"),
        ({"taskset": "my-sums", "env": {"agent": {"harness": "bash"}}}, "env.agent.harness must be an object"),
        ({"taskset": "my-sums", "select": {"include": {"idx": [99]}}}, "the taskset has no tasks"),
    ],
)
def test_what_verifiers_cannot_run_fails_before_any_rollout(
    server: ServerProcess, engine: ThreadedEngine, payload: Json, problem: str
) -> None:
    run = server.start_run("verifiers", remote_engine_url=engine.url, **payload)
    poll_until(lambda: run.view()["state"] == "failed", LIMIT_S)
    assert problem in run.view()["reason"].partition("Traceback")[0]
    assert run.groups() == []


def test_a_python_without_verifiers_says_what_to_install(make_server: MakeServer, engine: ThreadedEngine) -> None:
    server = make_server(environment_python=sys.executable, max_restarts=0)
    run = server.start_run("verifiers", remote_engine_url=engine.url, taskset="my-sums")
    poll_until(lambda: run.view()["state"] == "failed", LIMIT_S)
    reason = run.view()["reason"]
    assert f"environment_python ({sys.executable}) lacks verifiers" in reason
    assert "ENV/bin/pip install verifiers==0.4.0 msgspec uv" in reason


def test_the_commands_of_the_page_work(server: ServerProcess) -> None:
    install, *starts, with_shell = COMMANDS
    assert "verifiers==0.4.0" in install
    assert "verifiers==0.4.0" in Path(__file__).with_name("install.sh").read_text()
    assert "env.agent.runtime.type=docker" in with_shell  # there is no Docker on the machines of the tests
    with ScriptedEngine(lambda call: str(call.number)).in_thread() as engine:
        for command, num_groups in zip(starts, (4, 2), strict=True):
            words = shlex.split(command.replace("http://127.0.0.1:30000", engine.url).replace("\\\n", ""))
            cli = [sys.executable, "-m", "forebay.server.cli", *words[1:], "--url", server.url]
            started = subprocess.run(cli, check=True, capture_output=True, text=True, timeout=LIMIT_S)
            groups = stored(NativeRun(server, started.stdout.split()[-1]))
            assert [len(samples) for samples in groups.values()] == [2] * num_groups
            assert {sample["outcome"] for samples in groups.values() for sample in samples} == {"ok"}
