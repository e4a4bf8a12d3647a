"""A training run with an exam beside it, on a scripted engine that answers the exam when a test allows it."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.client import BufferClient, Evaluation
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.kit import ServerProcess, poll_until, write_generator

GENERATOR = """
from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "digits"

async def reward_func(item):
    return float(item["messages"][-1]["content"])

def run_rollout(data):
    if data.get("crashes"):
        raise RuntimeError("no exam today")
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward_func, data.get("num_epoch", 1))
"""
NUM_EXAM = 12
"""Rollouts of the exam: 3 instances, 4 times each."""
PLENTY = 1_000


class ExamScript:
    """Answers 1 and 0 in turns. Of the exam, the first instance is always answered with 1, the last with 0."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.num_asked = 0
        """Calls of the exam."""
        self.is_open = False
        """Whether the exam is answered without ``allow``."""
        self.delay_s = 0.0
        """Seconds of each answer."""
        self.hangs = False
        """Whether answers to the exam, but for its first instance, hang until they are aborted and continued."""
        self._allowed = asyncio.Semaphore(0)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, call: ScriptedCall) -> Reply:
        self._loop = asyncio.get_running_loop()
        if "exam" in call.prompt:
            self.num_asked += 1
            if self.hangs and "exam 0" not in call.prompt:
                return Reply(text="" if call.said else "1", hang=not call.said)
            if not self.is_open:
                await self._allowed.acquire()
        self.counts[call.prompt] += 1
        fixed = {"exam 0": "1", "exam 2": "0"}
        answer = next((text for key, text in fixed.items() if key in call.prompt), str(self.counts[call.prompt] % 2))
        return Reply(text=answer, delay_s=self.delay_s)

    def allow(self, num: int = PLENTY) -> None:
        """Let ``num`` more calls of the exam be answered."""
        assert self._loop is not None, "nothing was asked yet"
        for _ in range(num):
            self._loop.call_soon_threadsafe(self._allowed.release)


@dataclass
class Training:
    """A client whose run trains on 8 instances, two rollouts each, and has the task ``exam``."""

    client: BufferClient
    server: ServerProcess
    script: ExamScript
    engine: ThreadedEngine
    fields: dict[str, Any] = field(default_factory=dict)

    def start(self, evaluate: dict[str, Any] | None = None, **changes: Any) -> None:
        """Start the run; ``evaluate`` adds to its settings of that name."""
        settings = {"tasks": {"exam": self.fields}, **(evaluate or {})}
        rows = _rows(self.server.directory / "train.jsonl", "train", 8)
        given = {"remote_engine_url": self.engine.url, "evaluate": settings, **changes}
        self.client.start("digits", 2, rows, **given)

    def step(self, number: int, num_groups: int = 2) -> list[str]:
        """Read a batch and set the checkpoint; the ids of its groups."""
        batch = self.client.read(num_groups=num_groups, step=number, wait_s=60)
        assert batch is not None
        self.client.checkpoint(number, batch)
        return list(batch.group_ids)

    def evaluations(self) -> list[Evaluation]:
        return self.client.stats().evaluations

    def result(self) -> Evaluation:
        """The only evaluation, once it is over."""
        return poll_until(lambda: next((each for each in self.evaluations() if each.state != "running"), None))

    def wait_asked(self, num: int = 1) -> None:
        """Wait until the engine was asked ``num`` questions of the exam."""
        poll_until(lambda: self.script.num_asked >= num)

    def wait_counted(self, num: int) -> None:
        poll_until(lambda: [each for each in self.evaluations() if each.num_counted >= num])


@contextmanager
def training(server: ServerProcess, max_running: int | None = None) -> Iterator[Training]:
    """A training that has not started, on an engine that answers ``max_running`` calls at once."""
    write_generator(server.generators, GENERATOR, "digits_generator.py")
    exam, script = _rows(server.directory / "exam.jsonl", "exam", 3), ExamScript()
    with ScriptedEngine(script, max_running=max_running).in_thread() as engine, BufferClient(server.url) as client:
        yield Training(client, server, script, engine, {"input_file": str(exam), "group_size": 4})
        for run in client.runs():
            client.attach(run.run_id)
            client.stop()


def _rows(path: Path, name: str, num: int) -> Path:
    rows = [{"instance_id": f"{name}-{n}", "prompt": f"{name} {n}"} for n in range(num)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
