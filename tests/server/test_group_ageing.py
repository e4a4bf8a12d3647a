"""A group whose rollouts wait for something else does not age: a real run process, whose policy has a barrier."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from forebay.server.cli.command_line import app as cli
from tests.conftest import MakeServer
from tests.e2e.reading import run_process_of
from tests.kit import Json, NativeRun, ServerProcess, poll_until, write_generator

BARRIER = """
from collections import deque
from forebay.core.scheduling.policy import NextRollout, RolloutKey
from forebay.generators.base import BaseGenerator, single_turn
from forebay.generators.job import run_job

TASK_TYPE = "barrier"


class Barrier:
    '''The first rollout of every group, and the others once all of those have ended.'''

    concurrency = 1.0

    def __init__(self):
        self.first, self.rest, self.going, self.begun = deque(), deque(), set(), set()

    def room(self):
        return 64

    def submit(self, group):
        first, *rest = (RolloutKey(group.group, number) for number in group.numbers)
        self.rest += [first, *rest] if group.taken else rest
        self.first += [] if group.taken else [first]

    def next(self, loads):
        waiting = self.first or (None if self.going else self.rest)
        if not waiting or not (loads.may_begin or waiting[0].group in self.begun):
            return None
        rollout = waiting.popleft()
        self.begun.add(rollout.group)
        self.going |= {rollout} if waiting is self.first else set()
        return NextRollout(rollout, loads.least())

    def ended(self, rollout, end):
        self.going.discard(rollout)

    def closed(self, group):
        self.first, self.rest = (deque(r for r in q if r.group != group) for q in (self.first, self.rest))
        self.going = {r for r in self.going if r.group != group}

    def engine_lost(self, url): ...
    def begin_step(self, number): ...


run_job.policy_of = lambda plan, max_tokens: Barrier()


async def reward(item):
    return 0.5


def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward)
"""
TIMEOUT_S = 5.0


class Script:
    """Answers the first call of ``short`` at once, that of ``long`` when told to, and nothing that comes behind."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self._answered: set[str] = set()

    async def __call__(self, call: ScriptedCall) -> str | Reply:
        while call.prompt == "long" and not self.goes_on.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # another thread sets it
        if call.prompt in self._answered:
            return Reply(text="never said whole", hang=True)
        self._answered.add(call.prompt)
        return call.prompt


class Barred:
    """A run of two groups of two. Of ``short`` a sample is there, and its other rollout waits for that of ``long``."""

    def __init__(self, run: NativeRun, engine: ThreadedEngine, script: Script) -> None:
        self.run = run
        self.engine = engine
        self._script = script

    def go_on(self) -> None:
        """Let the barrier end: what follows hangs."""
        self._script.goes_on.set()

    def group(self, name: str) -> Json:
        """A group; empty before it has opened."""
        return next((group for group in self.run.groups() if group["instance_id"] == name), {})

    def wait_idle(self) -> None:
        poll_until(lambda: (group := self.group("short")) and group["num_samples"] and group["idle_since_s"])

    def pass_s(self, seconds: float) -> None:
        """Wait until the run's deadlines have counted so far on."""
        until_s = self.active_s() + seconds
        poll_until(lambda: self.active_s() >= until_s)

    def active_s(self) -> float:
        return float(self.run.view()["active_s"])

    def closed(self, name: str) -> Json:
        """The group once it is closed."""
        group = poll_until(lambda: found if (found := self.group(name))["state"] != "open" else {})
        assert (group["state"], group["reason"]) == ("discarded", "timed_out")
        return group


def age_s(group: Json) -> float:
    """Of a closed group, as its deadlines counted it."""
    return float(group["closed_s"] - group["opened_s"] - group["idle_s"])


@pytest.fixture(scope="module")
def barring(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    write_generator(server.generators, BARRIER, "barrier_generator.py")
    return server


@pytest.fixture
def start(barring: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., Barred]]:
    rows, script = tmp_path / "rows.jsonl", Script()
    rows.write_text("".join(json.dumps({"instance_id": name, "prompt": name}) + "\n" for name in ("short", "long")))
    with ScriptedEngine(script).in_thread() as engine:
        runs = list[NativeRun]()

        def start_run(**settings: Any) -> Barred:
            payload = {"input_file": str(rows), "remote_engine_url": engine.url, "num_process": 8, **settings}
            runs.append(barring.start_run("barrier", 2, **payload))
            return Barred(runs[-1], engine, script)

        yield start_run
        for run in runs:
            run.stop()


def test_a_barrier_longer_than_the_time_out_closes_no_group(start: Callable[..., Barred]) -> None:
    barred = start(group_timeout_seconds=TIMEOUT_S)
    barred.wait_idle()
    barred.pass_s(2 * TIMEOUT_S)
    assert (barred.group("short")["state"], barred.run.view()["num_groups_idle"]) == ("open", 1)
    assert barred.group("long")["idle_since_s"] is None
    metrics = barred.run.client.get("/metrics").text
    assert "forebay_groups_idle 1.0" in metrics
    shown = CliRunner().invoke(cli, ["status", barred.run.run_id, "--url", barred.run.server.url]).stdout
    assert "1 of the open groups has no rollout in flight" in shown
    barred.go_on()
    group = barred.closed("short")  # its other rollout hangs
    assert group["idle_s"] >= 2 * TIMEOUT_S
    assert group["closed_s"] - group["last_sample_s"] - group["idle_s"] >= TIMEOUT_S
    barred.closed("long")


def test_nor_does_one_longer_than_the_deadline(start: Callable[..., Barred]) -> None:
    barred = start(group_deadline_seconds=2 * TIMEOUT_S)
    barred.wait_idle()
    assert age_s(barred.closed("long")) >= 2 * TIMEOUT_S  # its first rollout hangs, which holds the others up
    assert barred.group("short")["state"] == "open"
    group = barred.closed("short")
    assert group["idle_s"] > TIMEOUT_S
    assert age_s(group) >= 2 * TIMEOUT_S


def test_it_holds_over_kills_of_the_run_process_and_of_the_server(
    start: Callable[..., Barred], barring: ServerProcess
) -> None:
    barred = start(group_timeout_seconds=TIMEOUT_S)
    barred.wait_idle()
    run_process_of(barring).kill()
    barred.engine.wait_calls(3)  # the next one asks for ``long`` again, and ``short`` has to wait for that
    barred.pass_s(TIMEOUT_S)
    assert [barred.group(name)["state"] for name in ("short", "long")] == ["open", "open"]
    before = barred.group("long")
    barring.kill9()
    barring.restart()
    assert barred.group("short")["idle_since_s"] is not None
    barred.engine.wait_calls(4)
    after = barred.group("long")
    assert after["idle_since_s"] is None
    assert after["idle_s"] > before["idle_s"] + 0.1  # while the next process began
    barred.pass_s(TIMEOUT_S)
    assert barred.group("short")["state"] == "open"
    barred.go_on()
    assert barred.closed("short")["idle_s"] >= 2 * TIMEOUT_S
