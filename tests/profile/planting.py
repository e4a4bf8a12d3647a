"""Runs in which one thing is slow, and what that costs: known from what was planted, not from a report."""

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.kit import Json, NativeRun, ServerProcess

A, B = 0, 1
"""The two engines. What an engine does wrong, the second one does."""
TOLERANCE = 0.15
TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a seed varies."""

    num_steps: int = 3
    num_groups: int
    """Per step."""
    group_size: int
    num_tokens: int
    """Mean length of an answer."""
    tokens_per_s: float = 80.0
    tool_s: float = 0.3
    prefill_s: float = 0.1


@dataclass(frozen=True)
class Pace:
    """How fast an engine answers one call."""

    tokens_per_s: float
    prefill_s: float
    cached_share: float = 0.9

    def seconds(self, num_tokens: int) -> float:
        return num_tokens / self.tokens_per_s + self.prefill_s


@dataclass(frozen=True)
class Planned:
    """One call as the script answered it."""

    rollout: tuple[int, int]
    """Row and slot."""
    attempt: int
    came_s: float
    usual_s: float
    seconds: float


@dataclass
class Planted:
    """What is slow in a run. Without changes, nothing: each row changes some of its methods."""

    seed: int
    run: NativeRun = field(init=False)
    engines: list[str] = field(default_factory=list)
    """Their addresses, as the run knows them."""
    calls: list[Planned] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    """By step: from the trainer's question to its last answer."""

    row: ClassVar[str] = "clean"
    cause: ClassVar[str] = ""
    event: ClassVar[str] = ""
    is_of_engine: ClassVar[bool] = False
    words: ClassVar[str] = "nothing is slow"
    in_sentence: ClassVar[tuple[str, ...]] = ()
    """Words that the finding must have."""
    is_only_finding: ClassVar[bool] = False
    settings: ClassVar[Json] = {}
    """Of the run."""

    def __post_init__(self) -> None:
        self.sizes = self.vary(random.Random(f"{self.row}-{self.seed}"))

    def vary(self, rng: random.Random) -> Sizes:
        return Sizes(num_groups=rng.randint(4, 5), group_size=rng.randint(2, 3), num_tokens=rng.randint(60, 90))

    def usual(self) -> Pace:
        return Pace(self.sizes.tokens_per_s, self.sizes.prefill_s)

    def pace(self, engine: int, number: int) -> Pace:
        """Of the engine's call ``number``, from 0."""
        return self.usual()

    def tool(self, rollout: tuple[int, int], attempt: int) -> tuple[float, bool]:
        """How long it takes, and whether it raises."""
        return self.sizes.tool_s, False

    def network_s(self, engine: int) -> float:
        """How much longer a call takes on its way there and back."""
        return 0.0

    def task(self, number: int) -> Json:
        """What the row of the input file has besides its prompt."""
        return {}

    def num_rows(self) -> int:
        return self.sizes.num_steps * self.sizes.num_groups

    # --- the engines

    async def answer(self, engine: int, number: int, call: ScriptedCall) -> Reply:
        rollout, attempt = _rollout(call)
        is_first = call.messages[-1]["role"] == "user"
        rng = random.Random(f"{self.seed}-{rollout}-{is_first}")
        if is_first:
            tool_s, fails = self.tool(rollout, attempt)
            reply = tool_call(tool_s, fails=fails)
        else:
            text = "a" * round(self.sizes.num_tokens * rng.uniform(0.85, 1.15))
            reply = Reply(text=text[len(call.said) :])  # between two steps, calls may be ended and gone on with
        num_tokens, pace, usual = len(reply.tokens()), self.pace(engine, number), self.usual()
        seconds = pace.seconds(num_tokens) + self.network_s(engine)
        self.calls.append(Planned(rollout, attempt, time.monotonic(), usual.seconds(num_tokens), seconds))
        cached = round(pace.cached_share * len(call.prompt_ids))
        return replace(reply, tokens_per_s=pace.tokens_per_s, prefill_s=pace.prefill_s, cached_tokens=cached)

    def script(self, engine: int) -> Any:
        numbers = iter(range(sys.maxsize))

        async def answer(call: ScriptedCall) -> Reply:
            return await self.answer(engine, next(numbers), call)

        return answer

    @contextmanager
    def serving(self) -> Iterator[list[ThreadedEngine]]:
        with ExitStack() as stack:
            engines = [stack.enter_context(ScriptedEngine(self.script(each)).in_thread()) for each in (A, B)]
            self.engines = [stack.enter_context(self.reached(n, engine.url)) for n, engine in enumerate(engines)]
            yield engines

    @contextmanager
    def reached(self, engine: int, url: str) -> Iterator[str]:
        """The address under which the run reaches an engine."""
        yield url

    # --- the run and its trainer

    def go(self, server: ServerProcess) -> NativeRun:
        """Run all steps."""
        with self.serving() as engines:
            self.run = self.start(server)
            self.train(engines)
            self.end()
        return self.run

    def end(self) -> None:
        self.announce(self.sizes.num_steps)  # until then, the run does not look whether the file has more
        self.run.wait_for_state("finished")

    def start(self, server: ServerProcess, **settings: Any) -> NativeRun:
        rows = [
            {"instance_id": f"row-{n}", "prompt": json.dumps({"n": n}), **self.task(n)} for n in range(self.num_rows())
        ]
        input_file = server.directory / f"{self.row}-{self.seed}.jsonl"
        input_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        held = {"groups_per_step": self.sizes.num_groups, "leftover": "defer"}
        return server.start_run(
            "rows",
            **{
                "group_size": self.sizes.group_size,
                "input_file": str(input_file.absolute()),
                "remote_engine_url": ",".join(self.engines),
                "num_process": 2 * self.sizes.num_groups * self.sizes.group_size,
                "oversampling": held,
                "sampling_params": {"max_tokens": 10_000},
                **self.settings,
                **settings,
            },
        )

    def train(self, engines: list[ThreadedEngine]) -> None:
        for step in range(self.sizes.num_steps):
            self.announce(step)
            if not step:
                self.wait_begun(engines)
            self.read(step)

    def announce(self, step: int) -> None:
        self.run.client.put(f"{self.run.path}/weight_version", json={"weight_version": step}).raise_for_status()

    def wait_begun(self, engines: list[ThreadedEngine]) -> None:
        """The trainer is ready when the process of the run is: its start is part of no step."""
        deadline_s = time.monotonic() + 60
        while not any(engine.calls for engine in engines):
            assert time.monotonic() < deadline_s, self.run.view()
            time.sleep(0.005)

    def read(self, step: int) -> None:
        asked_s = time.monotonic()
        batch = self.run.read(num_groups=self.sizes.num_groups, wait_s=60, step=step)
        self.waits_s.append(time.monotonic() - asked_s)
        self.run.ack(batch)

    # --- what it costs

    def costs_s(self) -> list[float]:
        """By step: how much longer it waited than without the fault."""
        usual_s, seconds = self._steps_s()
        return [slow - usual for usual, slow in zip(usual_s, seconds, strict=True)]

    def is_cost(self, seconds: float, step: str | None) -> bool:
        """Whether a report's seconds of one step, or of all (None), are about those that were planted."""
        costs_s = self.costs_s()
        planted_s = sum(costs_s) if step is None else costs_s[int(step)]
        return abs(seconds - planted_s) <= TOLERANCE * planted_s

    def usual_waits_s(self) -> list[float]:
        return self._steps_s()[0]

    def _steps_s(self) -> tuple[list[float], list[float]]:
        """By step: how long its longest rollout takes usually, and how long it took."""
        by_rollout: dict[tuple[int, int], list[Planned]] = defaultdict(list)
        for call in sorted(self.calls, key=lambda each: each.came_s):
            by_rollout[call.rollout].append(call)
        steps: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rollout, calls in by_rollout.items():
            last = [call for call in calls if call.attempt == calls[-1].attempt]
            tool_s = self.usual_tool_s()
            usual_s = sum(call.usual_s for call in last) + tool_s
            lost_s = last[0].came_s - calls[0].came_s
            seconds = lost_s + sum(call.seconds for call in last) + self.tool(rollout, last[0].attempt)[0]
            steps[rollout[0] // self.sizes.num_groups].append((usual_s, seconds))
        ordered = [steps[step] for step in sorted(steps)]
        return [max(u for u, _ in each) for each in ordered], [max(s for _, s in each) for each in ordered]

    def usual_tool_s(self) -> float:
        return self.sizes.tool_s

    @property
    def worker(self) -> str:
        return self.engines[B] if self.is_of_engine else ""

    def truth(self) -> Json:
        costs = [round(each, 3) for each in self.costs_s()]
        return {
            "row": self.row,
            "seed": self.seed,
            "planted": self.words,
            "cause": self.cause,
            "worker": self.worker,
            "event": self.event,
            "seconds_by_step": {str(step): cost for step, cost in enumerate(costs)},
            "seconds": round(sum(costs), 3),
            "waits_s": [round(each, 3) for each in self.waits_s],
            "engines": self.engines,
        }


def tool_call(seconds: float, *, fails: bool = False) -> Reply:
    """A reply that calls the tool."""
    arguments = json.dumps({"s": seconds, "bad": True} if fails else {"s": seconds})
    return Reply(
        tool_calls=[{"id": "call-1", "type": "function", "function": {"name": "search", "arguments": arguments}}]
    )


def _rollout(call: ScriptedCall) -> tuple[tuple[int, int], int]:
    """Row and slot, and the attempt: from the prompt, and from the id that the run gave the call."""
    slot, attempt = (call.rid or "").split("-")[-3:-1]
    return (json.loads(call.messages[0]["content"])["n"], int(slot, 16)), int(attempt, 16)


def profile(run: NativeRun) -> Json:
    """What ``forebay profile`` says about a run."""
    command = [sys.executable, "-m", "forebay.server.cli", "profile", run.run_id, "--url", run.server.url]
    ended = subprocess.run([*command, "--format", "json"], check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    report: Json = json.loads(ended.stdout)
    return report
