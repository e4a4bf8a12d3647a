"""The task type ``harbor`` with the real Harbor: two task folders, without Docker."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.engines.scripted import ScriptedEngine, ThreadedEngine
from forebay.generators.harbor_generator import LIBRARY
from tests.conftest import MakeServer
from tests.generators.agent_kit import LIMIT_S, stored
from tests.kit import NativeRun, ServerProcess, poll_until

PAGE = Path(__file__).parents[2] / "docs/harbor.md"
pytestmark = pytest.mark.environments

WRITTEN = {
    "task.toml": "",
    "instruction.md": "Write the sum of 40 and 2 to answer.txt.",
    "environment/Dockerfile": """FROM python:3.12
# Comments are no steps.
WORKDIR /work
COPY /ask.py \\
  ./
COPY ask.py /top.py
""",
    "environment/ask.py": """
import json, os, urllib.request
messages = [{"role": "user", "content": os.environ["FOREBAY_INSTRUCTION"]}]
body = {"model": os.environ["FOREBAY_MODEL"], "messages": messages}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"], file=open("/work/answer.txt", "w"))
""",
    "solution/solve.sh": "echo 42 > /work/answer.txt",
    "tests/test.sh": """#!/bin/bash
if [ -f /top.py ] && grep -qx 42 /work/answer.txt; then right=1; else right=0; fi
echo "{\\"reward\\": $right, \\"is_short\\": 0.5}" > /logs/verifier/reward.json
""",
}
MADE = {
    "instruction.md": "Write the sum of 40 and 2 to /app/answer.txt.",
    "solution/solve.sh": "echo 42 > /app/answer.txt",
    "tests/test.sh": "#!/bin/bash\ngrep -sqx 42 /app/answer.txt && is=1; echo ${is-0} > /logs/verifier/reward.txt\n",
}
"""What is filled into Harbor's template, whose verifier has an environment of its own."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    numbers = count()
    with ScriptedEngine(lambda _: "42" if next(numbers) % 2 else "41").in_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, environment_python: str) -> ServerProcess:
    # The values of Docker and of the proxy are those of a machine without Docker and without a network.
    nowhere = {"DOCKER_HOST": "unix:///nowhere", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": ""}
    return module_servers(environment_python=environment_python, env=nowhere)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    return write(folder / "written", WRITTEN).parent


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def make(folder: Path, python: str) -> None:
    """A task from Harbor's own template."""
    harbor = Path(python).with_name("harbor")
    words = [harbor, "init", "--task", "my/made", "--output-dir", folder, "--no-pytest"]
    subprocess.run(words, check=True, capture_output=True)
    config = write(folder / "made", MADE) / "task.toml"
    config.write_text(config.read_text().replace("artifacts = []", 'artifacts = ["/app/answer.txt"]'))


def start(server: ServerProcess, engine: ThreadedEngine, tasks: Path | str, agent: str, **payload: Any) -> NativeRun:
    payload = {"environment": "process", "group_size": 1, "max_attempts": 1, "model": "m", **payload}
    return server.start_run("harbor", tasks=str(tasks), agent=agent, remote_engine_url=engine.url, **payload)


def rewards(run: NativeRun) -> dict[str, list[float | None]]:
    return {name: [sample.get("reward") for sample in samples] for name, samples in stored(run).items()}


def test_the_oracle_gets_1_and_an_agent_that_does_nothing_0(
    server: ServerProcess, engine: ThreadedEngine, tasks: Path, environment_python: str
) -> None:
    make(tasks, environment_python)
    oracle, idle = (start(server, engine, tasks, agent) for agent in ("oracle", "nop"))
    assert rewards(oracle) == {"written": [1], "my/made": [1]}
    assert rewards(idle) == {"written": [0], "my/made": [0]}
    assert stored(oracle)["written"][0]["reward_parts"] == {"is_short": 0.5}
    assert not engine.calls


def test_an_agent_that_is_a_command_has_the_gateway_as_its_model(
    server: ServerProcess, engine: ThreadedEngine, tasks: Path
) -> None:
    samples = stored(start(server, engine, tasks, "python3 ask.py", group_size=2))["written"]
    for sample in samples:
        question, answer = (message["content"] for message in sample["messages"])
        assert question == WRITTEN["instruction.md"]
        assert sample["reward"] == float(answer == "42")
        assert sum(sample["loss_mask"]) > 0
        assert len(sample["tokens"]) == len(sample["loss_mask"]) == len(sample["logprobs"])
    assert sorted(sample["reward"] for sample in samples) == [0, 1]


@pytest.mark.parametrize(
    ("agent", "test", "outcome", "message"),
    [
        ("echo lost >&2; exit 3", "echo 0 > /logs/verifier/reward.txt", "agent_failure", "ended with status 3: lost"),
        ("oracle", "exit 1", "judge_failure", "No reward file found"),
        ("oracle", "echo nan > /logs/verifier/reward.txt", "judge_failure", "Non-finite reward"),
    ],
)
def test_a_crash_gives_no_reward(
    server: ServerProcess, engine: ThreadedEngine, tasks: Path, agent: str, test: str, outcome: str, message: str
) -> None:
    write(tasks / "written", {"tests/test.sh": f"#!/bin/bash\n{test}\n"})
    (sample,) = stored(start(server, engine, tasks, agent))["written"]
    assert (sample["status"], sample["outcome"], sample.get("reward")) == ("failed", outcome, None)
    assert message in sample["error"]["message"]


INVALID: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "agent": ({}, {"agent": "terminator"}, "Harbor has no agent 'terminator'"),
    "environment": ({}, {"environment": "moon"}, "Harbor has no environment 'moon'"),
    "docker": ({}, {"environment": "docker"}, "the environment 'docker' cannot be used: Docker"),
    "folder": ({}, {"tasks": "/nowhere"}, "there is no folder /nowhere"),
    "registry": ({}, {"tasks": "terminal-bench@2.0"}, "Harbor's registry gave no tasks for 'terminal-bench@2.0'"),
    "verifier": ({"tests/test.sh": ""}, {}, "does not contain tests/test.sh"),
    "line": (
        {"environment/Dockerfile": "FROM x\nCOPY . .\nRUN make \\\n  all"},
        {},
        "Dockerfile, line 3: RUN make",
    ),
    "target": ({"environment/Dockerfile": "FROM x\nCOPY . /usr/bin"}, {}, "cannot write into /usr"),
    "user": ({"task.toml": '[agent]\nuser = "me"'}, {}, "runs everything as root (got user 'me')"),
    "network": ({"task.toml": '[environment]\nnetwork_mode = "no-network"'}, {}, "network_mode='no-network'"),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_is_invalid_fails_the_run_before_any_rollout(
    server: ServerProcess, engine: ThreadedEngine, tasks: Path, case: str
) -> None:
    files, payload, message = INVALID[case]
    write(tasks / "written", files)
    if case == "verifier":
        (tasks / "written/tests/test.sh").unlink()
    given = {"tasks": str(tasks), "agent": "oracle", "environment": "process", **payload}
    run = start(server, engine, **given)  # type: ignore[arg-type] # its payload is open
    assert message in run.wait_for_state("failed", LIMIT_S)["reason"]
    assert run.groups() == []
    assert "restart in" not in server.log()


def test_a_machine_without_the_rights_refuses_tasks_without_docker(
    make_server: MakeServer, environment_python: str, engine: ThreadedEngine, tasks: Path
) -> None:
    server = make_server(environment_python=environment_python, env={"PATH": "/nowhere"})
    view = start(server, engine, tasks, "oracle").wait_for_state("failed", LIMIT_S)
    assert "it needs the program unshare" in view["reason"]


def test_a_killed_run_leaves_no_process_and_no_mount(
    make_server: MakeServer, environment_python: str, engine: ThreadedEngine, tasks: Path
) -> None:
    server = make_server(environment_python=environment_python)
    mark = f"7{os.getpid()}"
    start(server, engine, tasks, f"setsid sleep {mark} & sleep {mark}")
    poll_until(lambda: len(sleeping(mark)) == 2, LIMIT_S)
    server.kill9()
    poll_until(lambda: not sleeping(mark))
    assert "forebay-sandbox" not in Path("/proc/self/mountinfo").read_text()


def test_a_stopped_run_leaves_no_process_and_no_folder(
    make_server: MakeServer, environment_python: str, engine: ThreadedEngine, tasks: Path, tmp_path: Path
) -> None:
    # On a busy machine, closing takes longer than the seconds after which a run is killed.
    server = make_server(
        environment_python=environment_python, stop_grace_s=30, stop_limit_s=60, env={"TMPDIR": str(tmp_path)}
    )
    mark = f"8{os.getpid()}"
    run = start(server, engine, tasks, f"setsid sleep {mark} & sleep {mark}")
    poll_until(lambda: len(sleeping(mark)) == 2, LIMIT_S)
    run.stop()
    run.wait_for_state("stopped", LIMIT_S)
    assert not sleeping(mark)
    assert not list(tmp_path.glob("forebay-*"))


SLOW = """
import asyncio, os
from pathlib import Path
from harbor_process import ProcessEnvironment

class Slow(ProcessEnvironment):
    async def stop(self, delete):
        while not (Path(__file__).parent / "may_stop").exists():
            await asyncio.sleep(0.05)
        await super().stop(delete)
        (Path(__file__).parent / "has_stopped").touch()
"""


def test_an_environment_can_be_removed_after_the_end_of_its_run(
    make_server: MakeServer, environment_python: str, engine: ThreadedEngine, tasks: Path, tmp_path: Path
) -> None:
    env = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(write(tmp_path, {"slow_environment.py": SLOW}))}
    server = make_server(environment_python=environment_python, env=env)
    mark = f"9{os.getpid()}"
    run = start(server, engine, tasks, f"sleep {mark}", environment="slow_environment:Slow")
    poll_until(lambda: len(sleeping(mark)) == 1, LIMIT_S)
    run.stop()
    run.wait_for_state("stopped")
    (tmp_path / "may_stop").touch()
    poll_until((tmp_path / "has_stopped").exists)


def sleeping(mark: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", mark]]


def test_the_commands_of_the_page_work(
    server: ServerProcess, engine: ThreadedEngine, tmp_path: Path, environment_python: str
) -> None:
    install, *commands = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert f"pip install {LIBRARY.install}\n" in install
    (tmp_path / "harbor").symlink_to(Path(environment_python).parents[1])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "HOME": str(tmp_path), "PATH": path, "FOREBAY_URL": server.url}
    runs = []
    for command in commands:
        words = ["bash", "-ec", command.replace("http://127.0.0.1:30000", engine.url)]
        done = subprocess.run(words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
        runs.append(NativeRun(server, done.stdout.split()[-1]))
    assert rewards(runs[0]) == {"my/answer": [1]}
    assert sorted(rewards(runs[1])["my/answer"], key=str) == [0, 0, 0, 0, 1, 1, 1, 1]
