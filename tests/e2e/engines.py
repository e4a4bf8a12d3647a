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

START_LIMIT_S = 180.0
PLENTY = 1_000


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
    """Numbers its answers to each prompt from 1, and gives no more of them than it is allowed to."""

    def __init__(self, num_allowed: int = PLENTY) -> None:
        self.answered: Counter[str] = Counter()
        """Answers given, by prompt."""
        self.is_down = False
        """Set to answer 503 instead, as an engine does that is about to go."""
        self._allowed = asyncio.Semaphore(num_allowed)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, call: ScriptedCall) -> Reply:
        self._loop = asyncio.get_running_loop()
        await self._allowed.acquire()
        if self.is_down:
            return Reply(text="going down", error_status=503)
        self.answered[call.prompt] += 1
        return Reply(text=str(self.answered[call.prompt]))

    def allow(self, num: int = PLENTY) -> None:
        """Let ``num`` calls more be answered, those first that wait already."""
        assert self._loop is not None, "nothing was asked yet"
        for _ in range(num):
            self._loop.call_soon_threadsafe(self._allowed.release)


@contextmanager
def scripted(script: GatedScript) -> Iterator[ThreadedEngine]:
    """A scripted engine in a thread of its own."""
    with ScriptedEngine(script).in_thread() as engine:
        yield engine
