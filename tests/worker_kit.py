"""A worker for tests of the backends, sent to other processes by value: they need not find the tests."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import cloudpickle
import psutil

from forebay.workers.backends.abc import MethodCall, RunningWorker, WorkerSpec
from forebay.workers.members.worker import ClassWithInitArgs, Worker

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Probe(Worker):
    """Does whatever a test wants to see done."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.pid_at_first = os.getpid()
        self.seen: list[Any] = []

    def add(self, number: int, *, times: int = 1) -> int:
        return (self.number + number) * times

    async def add_later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.number + number

    def where(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "pid_at_first": self.pid_at_first,
            "rank": self.rank,
            "world_size": self.world_size,
            "node": self.node,
            "is_main_thread": threading.current_thread() is threading.main_thread(),
            "thread": threading.get_ident(),
        }

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def echo(self, value: Any) -> Any:
        return value

    def remember(self, value: Any) -> None:
        self.seen.append(value)

    def remembered(self) -> list[Any]:
        return self.seen

    def fill(self, array: Any, value: float) -> Any:
        array[:] = value
        return array

    def generator(self) -> Any:
        return (number for number in range(3))

    def fail(self) -> None:
        raise KeyError("not here")

    def fail_oddly(self) -> None:
        class Odd(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"{one} and {two}")

        raise Odd(1, 2)

    def exit(self, status: int) -> None:
        os._exit(status)

    def say(self, words: str) -> None:
        print(words, flush=True)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def sleep_until(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.005)
        return "slept"

    def spin(self) -> None:
        while True:
            pass

    def keep_the_interpreter(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)

    def start_program(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    async def block_the_loop(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.005)  # noqa: ASYNC251 - what a test wants to see

    async def wait_forever(self) -> None:
        self.seen.append("waits")
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.append("cancelled")


class Unreadable:
    """Can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


class Unmakable(Worker):
    def __init__(self) -> None:
        raise LookupError("no weights here")


def specs(
    count: int = 1, cls: type[Worker] = Probe, *args: Any, env: Mapping[str, str] | None = None
) -> list[WorkerSpec]:
    """One node's worth of workers, with few CPUs each."""
    classes = {"": ClassWithInitArgs(cls, *args)}
    return [WorkerSpec(rank, count, rank, count, 0, classes, env or {}, cpus=0.1) for rank in range(count)]


def call(worker: RunningWorker, method: str, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
    """The future of one call."""
    return worker.call(MethodCall("", method, args, kwargs, deadline_s=deadline_s))


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
