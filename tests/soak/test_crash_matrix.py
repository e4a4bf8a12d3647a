"""Server, run process and trainer, killed at random: by the models that survive, each group is trained on once."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from forebay.buffer.store.journal import JournalStore
from forebay.core.group import GroupState
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.conftest import MakeServer
from tests.e2e.payloads import make_payload, numbered_rows
from tests.e2e.reading import run_process_of
from tests.kit import NativeRun, ServerProcess, poll_until, write_generator
from tests.soak import matrix_trainer

GROUP_SIZE = 4
NUM_EPOCHS = 2
ANSWER_S = 0.05
LIMIT_S = 60.0
ROUNDS = int(os.environ.get("ROUNDS", "50"))
"""By hand, `make test-soak ROUNDS=200`."""
PARTS = ("server", "run process", "trainer")

COUNTING = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "counting"

async def reward_func(item):
    return 1 / (1 + int(item["messages"][-1]["content"]))

def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], single_turn, reward_func, data["num_epoch"])
"""
"""Each answer to a prompt has a reward of its own."""


class CountingScript:
    """Numbers its answers to each prompt."""

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()

    async def __call__(self, call: ScriptedCall) -> Reply:
        await asyncio.sleep(ANSWER_S)
        self.given[call.prompt] += 1
        return Reply(text=str(self.given[call.prompt]))


class Trainer:
    """The trainer's process, started again after each death."""

    def __init__(self, run: NativeRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._news = threading.Condition()
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        command = [sys.executable, matrix_trainer.__file__, self._run.server.url, self._run.run_id, str(self._folder)]
        log = (self._folder / "trainer.log").open("a")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        log.close()
        self._reader = threading.Thread(target=self._follow)
        self._reader.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.strip())
                self._news.notify_all()

    def wait_for_lines(self, number: int) -> None:
        """Until it has told so many more things than now, or is done."""
        with self._news:
            wanted = len(self.lines) + number
            if not self._news.wait_for(lambda: len(self.lines) >= wanted or self.is_done, LIMIT_S):
                raise AssertionError(f"the trainer does not get on:\n{self.log()}\n{self._run.server.log()}")

    @property
    def is_done(self) -> bool:
        return "done" in self.lines

    def log(self) -> str:
        return (self._folder / "trainer.log").read_text()[-3_000:]

    def kill9(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Its exit status, once everything that it told was heard."""
        status = self._process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


class Matrix:
    """One run with all its parts, and what may happen to each."""

    def __init__(self, server: ServerProcess, run: NativeRun, folder: Path, seed: int) -> None:
        self.trainer = Trainer(run, folder)
        self.killed: Counter[str] = Counter()
        self._server = server
        self._rng = random.Random(seed)
        self._next: list[str] = []

    def round(self) -> None:
        """Let everything get on for a while, then kill one part and start it again."""
        self.trainer.wait_for_lines(self._rng.randint(1, 6))
        if not self._next:
            self._next = self._rng.sample(PARTS, len(PARTS))
        victim = self._next.pop()
        {"server": self._kill_server, "run process": self._kill_run_process, "trainer": self._kill_trainer}[victim]()
        self.killed[victim] += 1

    def _kill_server(self) -> None:
        self._server.kill9()
        self._server.restart()

    def _kill_run_process(self) -> None:
        with suppress(psutil.NoSuchProcess):  # it ended by itself just now
            run_process_of(self._server).kill()

    def _kill_trainer(self) -> None:
        self.trainer.kill9()
        self.trainer.start()


@pytest.fixture
def script() -> CountingScript:
    return CountingScript()


@pytest.fixture
def engine_url(script: CountingScript) -> Iterator[str]:
    with ScriptedEngine(script).in_thread() as engine:
        yield engine.url


def start(make_server: MakeServer, tmp_path: Path, engine_url: str, num_rows: int) -> tuple[ServerProcess, NativeRun]:
    tasks = tmp_path / "tasks"
    write_generator(tasks, COUNTING, "counting_generator.py")
    server = make_server(generators=tasks, start_wait_s=60, max_restarts=10_000, segment_bytes=1 << 16)
    payload = make_payload(
        tmp_path,
        engine_url,
        numbered_rows(num_rows),
        task_type="counting",
        num_process="4",
        num_epoch=str(NUM_EPOCHS),
        num_repeat_per_sample=str(GROUP_SIZE),
        # Rollouts stay a little ahead of the trainer, so that each part has work to lose until the end.
        max_buffer_size=str(8 * GROUP_SIZE),
    )
    return server, server.start_run(**payload)


def check_model(folder: Path, num_rows: int) -> None:
    trained = json.loads((folder / "model.json").read_text())["trained"]
    times = Counter((instance_id, epoch) for instance_id, epoch in trained)
    assert set(times) == {(f"row-{n}", epoch) for n in range(num_rows) for epoch in range(NUM_EPOCHS)}
    assert set(times.values()) == {1}


async def check_store(data_dir: Path, run_id: str) -> None:
    """Each slot has one sample: what was stored was not generated again, or it would be there as surplus."""
    async with JournalStore(data_dir) as store:
        groups = await store.load_groups(run_id)
        assert {group.state for group in groups} == {GroupState.ACKED}
        for group in groups:
            rows = [sample.row for sample in await store.samples(run_id, group.group_id)]
            assert sorted((row.slot, row.outcome) for row in rows) == [(n, "member") for n in range(GROUP_SIZE)]


async def check_all(
    make_server: MakeServer, tmp_path: Path, engine_url: str, *, rounds: int, num_rows: int, seed: int
) -> Counter[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    server, run = start(make_server, tmp_path, engine_url, num_rows)
    matrix = Matrix(server, run, folder, seed)
    try:
        for _ in range(rounds):
            assert run.view()["state"] in ("validating", "running"), "the run is too short for its rounds"
            matrix.round()
        poll_until(lambda: matrix.trainer.is_done, timeout_s=900)
        assert matrix.trainer.wait() == 0, matrix.trainer.log()
    except BaseException:
        matrix.trainer.kill9()
        raise
    assert run.view()["discarded"] == {}
    assert server.stop() == 0
    check_model(folder, num_rows)
    await check_store(server.data_dir, run.run_id)
    return matrix.killed


@pytest.mark.soak
async def test_parts_killed_in_many_rounds_train_on_every_group_once(
    make_server: MakeServer, tmp_path: Path, engine_url: str
) -> None:
    killed = await check_all(make_server, tmp_path, engine_url, rounds=ROUNDS, num_rows=4 * ROUNDS, seed=ROUNDS)
    assert min(killed[part] for part in PARTS) >= ROUNDS // 5
