"""How near a simulation comes to a run on a real server, on engines that take their steps in real time."""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.benchmarks.machines import show
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import poll_until, write_generator
from tests.simulator.recorded_kit import STEPS

__all__ = ["forebay"]

pytestmark = pytest.mark.bench

MOST_ERROR, MOST_OFF_SPEED, LEAST_GAIN = 0.05, 0.2, 1.1


class Stepping:
    """An engine that gives each of its running sequences one token a step, the longer a step the more there are."""

    def __init__(self, step_s: float, per_sequence_s: float, length: Callable[[str], int]) -> None:
        self._step_s, self._per_sequence_s, self._length = step_s, per_sequence_s, length
        self._steps = self._at_s = 0.0
        self._running = 0
        self._changed = asyncio.Event()

    async def __call__(self, call: ScriptedCall) -> Reply:
        length = self._length(call.prompt)
        self._change(1)
        end = self._steps + length
        while end - self._steps > 1e-6:
            with suppress(TimeoutError):
                async with asyncio.timeout((end - self._steps) * self._now_s):
                    await self._changed.wait()
            self._advance()
        self._change(-1)
        return Reply(text="x" * (length - 1))  # and the token that ends it

    @property
    def _now_s(self) -> float:
        """Of a step."""
        return self._step_s + self._per_sequence_s * self._running

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._running:
            self._steps += (now_s - self._at_s) / self._now_s
        self._at_s = now_s

    def _change(self, by: int) -> None:
        self._advance()
        self._running += by
        self._changed.set()
        self._changed = asyncio.Event()


def length_of(prompt: str) -> int:
    """Of the answer to a prompt, which names the rollout: the same each time.

    Each is a small part of the run: which engine the last one gets hangs on milliseconds, and must not matter.
    """
    instance = prompt.split(maxsplit=1)[0]
    mean = random.Random(instance).lognormvariate(3.7, 0.3)
    return max(10, round(random.Random(prompt).gauss(mean, 0.2 * mean)))


def test_a_simulation_takes_as_long_as_the_run_did(forebay: Forebay, make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path / "tasks", STEPS, "steps_generator.py")
    input_file = tmp_path / "rows.jsonl"
    input_file.write_text("".join(f"{json.dumps({'instance_id': f'i{n}', 'prompt': f'i{n}'})}\n" for n in range(32)))
    server = make_server(generators=tmp_path / "tasks")
    slow, fast = (Stepping(factor * 0.004, factor * 0.001, length_of) for factor in (2, 1))
    with (
        ScriptedEngine(slow, has_metrics=False).in_thread() as first,
        ScriptedEngine(fast, has_metrics=False).in_thread() as second,
    ):
        urls = [first.url, second.url]
        run = server.start_run("steps", group_size=4, remote_engine_url=urls, input_file=str(input_file), num_process=4)
        poll_until(lambda: run.view()["state"] in ("finished", "failed"), 60)
    outcome = forebay("simulate", run.run_id, "--url", server.url, "--policy", "pull,static", "--seeds", 1, "--json")
    assert outcome.code == 0, outcome.err
    stated = json.loads(outcome.out)
    assert stated["answers"]["num_answers"] == 128
    speeds = {url: cost["speed"] for url, cost in stated["fit"]["costs"].items()}
    ratio = speeds[urls[1]] / speeds[urls[0]]
    pull, static = (row["measures"]["makespan_s"]["mean"] for row in stated["rows"])
    rows = [
        ("error of the self-check", stated["self_check"]["error"], f"at most {MOST_ERROR}"),
        ("speed of the fast engine over the slow one's", ratio, f"2, at most {MOST_OFF_SPEED} off"),
        ("static over pull", static / pull, f"at least {LEAST_GAIN}"),
    ]
    show("A run of 128 rollouts on engines of speeds 1:2, simulated", ("", "found", "target"), rows)
    assert abs(stated["self_check"]["error"]) <= MOST_ERROR
    assert abs(ratio - 2) < MOST_OFF_SPEED
    assert static > LEAST_GAIN * pull  # it deals them out evenly, to engines that are not equal
