"""Engines for end-to-end tests: the embedded one as a process that can be killed, and a scripted one with a gate."""

import asyncio
import json
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine

START_LIMIT_S = 90.0


class TinyProcess:
    """The embedded engine as its own process; it keeps its address over a restart."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._port = "0"
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill9()

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = [sys.executable, "-m", "forebay.engines.tiny", "--port", self._port]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(START_LIMIT_S), f"the engine was not ready within {START_LIMIT_S:g} s"
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        self.url = json.loads(line)["url"]
        self._port = self.url.rpartition(":")[2]

    def kill9(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


class GatedScript:
    """Numbers its answers to each prompt from 1. Beyond ``budget`` answers in all, calls wait until ``open``."""

    def __init__(self, budget: int | None = None) -> None:
        self.answered: Counter[str] = Counter()
        """Answers given, by prompt."""
        self._left = budget
        self._opened: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_answered(self) -> int:
        return self.answered.total()

    async def __call__(self, call: ScriptedCall) -> Reply:
        self._loop = asyncio.get_running_loop()
        self._opened = self._opened or asyncio.Event()
        if self._left == 0:
            await self._opened.wait()
        elif self._left is not None:
            self._left -= 1
        self.answered[call.prompt] += 1
        return Reply(text=str(self.answered[call.prompt]))

    def open(self) -> None:
        """Let every call through, those that wait included."""
        assert self._loop is not None
        assert self._opened is not None

        def let_through() -> None:
            assert self._opened is not None
            self._left = None
            self._opened.set()

        self._loop.call_soon_threadsafe(let_through)


@contextmanager
def scripted(script: GatedScript) -> Iterator[ThreadedEngine]:
    """A scripted engine in a thread of its own."""
    with ScriptedEngine(script).in_thread() as engine:
        yield engine
