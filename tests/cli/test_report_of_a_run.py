"""The report of a run with a real server, run process, engines and trainer, from its folder and from its stream."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.telemetry.analysis import analyse, load
from forebay.telemetry.analysis.report import ProfileReport
from forebay.telemetry.analysis.timeline import ProfileStep
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, poll_until

SLOW_S = 4.0
"""Longer than a machine with other work stands still."""
NUM_STEPS = 3


class Reckons:
    """One call of a tool, then the answer, right every other time; the prompt with a 9 is long in being read."""

    def __init__(self) -> None:
        self._answers: dict[str, Iterator[str]] = defaultdict(lambda: itertools.cycle("45"))

    def __call__(self, call: ScriptedCall) -> Reply:
        prompt = next(message["content"] for message in call.messages if message["role"] == "user")
        if call.messages[-1]["role"] == "tool":
            return Reply(text=f"It is \\boxed{{{next(self._answers[prompt])}}}.", delay_s=0.05)
        is_slow = "9" in prompt
        function = {"name": "calculator", "arguments": json.dumps({"expression": "2 + 2"})}
        tool_calls = [{"id": "c1", "type": "function", "function": function}]
        return Reply(tool_calls=tool_calls, prefill_s=SLOW_S if is_slow else 0.02)


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    return module_servers()


@pytest.fixture(scope="module")
def run(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> NativeRun:
    """Three steps of a group each; the third one's answers are slow."""
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    prompts = ["What is 1 + 3?", "What is 2 + 2?", "What is 9 - 5?"]
    rows.write_text("".join(json.dumps({"prompt": prompt, "label": "4"}) + "\n" for prompt in prompts))
    script = Reckons()
    with ScriptedEngine(script).in_thread() as one, ScriptedEngine(script).in_thread() as other:
        run = server.start_run(
            "tool",
            group_size=2,
            remote_engine_url=[one.url, other.url],
            input_file=str(rows),
            num_process=2,
        )
        for step in range(NUM_STEPS):
            run.take(num_groups=1, step=step, wait_s=20)
        poll_until(lambda: run.view()["state"] not in ("validating", "running"))
    return run


@pytest.fixture(scope="module")
def folder(server: ServerProcess, run: NativeRun) -> Path:
    run.client.get(f"{run.path}/trace")  # all that is recorded so far is on the disk then
    return Path(server.data_dir) / "runs" / run.run_id


@pytest.fixture(scope="module")
def steps(folder: Path) -> list[ProfileStep]:
    return list(load(folder).steps())


@pytest.fixture(scope="module")
def report(folder: Path) -> ProfileReport:
    return analyse(load(folder))


def test_each_read_is_a_step_with_its_rollouts(steps: list[ProfileStep], report: ProfileReport) -> None:
    assert [step.name for step in steps] == ["0", "1", "2"]
    assert [len(step.requests) for step in steps] == [2, 2, 2]
    assert all(request.is_used and request.ending == "finished" for step in steps for request in step.requests)
    assert report.num_problems == 0
    assert report.notes == []
    for before, after in itertools.pairwise(steps):
        assert after.begin_s == pytest.approx(before.end_s)


def test_phases_add_up_to_their_rollout(steps: list[ProfileStep]) -> None:
    for request in (request for step in steps for request in step.requests):
        assert sum(request.phases.values()) == pytest.approx(request.duration_s, rel=0.01)
        assert len(request.turns) == 2
        assert request.phases.keys() >= {"prefill", "decode", "tool", "reward", "write"}
        covered = sum(event.end_s - event.begin_s for event in request.events)
        assert covered >= 0.99 * request.duration_s


def test_each_path_adds_up_to_its_wait(report: ProfileReport) -> None:
    for step in report.steps:
        assert step.wait_s is not None
        assert sum(part.seconds for part in step.critical_path) == pytest.approx(step.wait_s, rel=0.01)
        assert step.train_s is not None
        assert step.send_s is not None
        assert step.train_s + step.wait_s + step.send_s == pytest.approx(step.seconds, rel=0.01)


def test_the_path_names_the_slow_prompt(steps: list[ProfileStep], report: ProfileReport) -> None:
    part = max(report.steps[2].critical_path, key=lambda part: part.seconds)
    assert (part.path.event, part.path.turn) == ("prefill", 0)
    (slow,) = [request for request in steps[2].requests if request.request_id == part.path.request]
    assert steps[2].asked_s is not None
    early_s = max(0.0, steps[2].asked_s - slow.begin_s)  # a wait begins with its read
    assert part.seconds >= 0.95 * SLOW_S - early_s
    assert part.seconds <= slow.phases["prefill"] + 0.001
    assert part.path.worker.startswith("http://127.0.0.1:")
    assert set(report.steps[2].requests_by_worker) <= {request.worker for step in steps for request in step.requests}


def test_the_stream_gives_the_same_report(run: NativeRun, report: ProfileReport) -> None:
    with run.client.stream("GET", f"{run.path}/trace") as response:
        lines = [line for line in response.iter_lines() if line]
    streamed = analyse(load(lines))
    assert streamed.steps == report.steps
    assert streamed.phase_shares == report.phase_shares
