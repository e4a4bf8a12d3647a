"""Main module of a worker's process: reads calls from a socket, runs them, and sends their outcomes back.

``python -m forebay.workers.backends.child SOCKET_FD PARENT_PID``, started by ``forebay.workers.backends.processes``.
It never outlives its controller. One thread reads the socket and notices its end while users' code runs. Another checks
the parent's id, in case a fork of the controller keeps the socket open. If an extension blocks all threads,
``faulthandler`` prints the traceback and ends the process.
"""

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from forebay.core.child_process import skip_httpx_command
from forebay.core.errors import InvalidInput
from forebay.workers.backends.channel import (
    CALL,
    CANCEL,
    CLOSE,
    OUTCOME,
    SMALL_BYTES,
    STARTED,
    VITALS,
    WorkerChannel,
    WorkerMessage,
)
from forebay.workers.backends.processes import STOOD_STILL_SHARE
from forebay.workers.backends.wire import Frames, from_frames, outcome_frames, read_call, read_classes, to_frames
from forebay.workers.members.host import WorkerHost, rss_bytes
from forebay.workers.members.worker_spec import Vitals, failed_future


class ChildProcess:
    """This process as a worker: the main thread runs methods in turn; other threads read, reply and report vitals."""

    def __init__(self, channel: WorkerChannel, parent_pid: int, spec_frames: Sequence[Any]) -> None:
        self._spec, path, silence_s, self._beat_s = from_frames(spec_frames[:1])
        sys.path[:] = path  # so that it can import whatever the controller can
        self._class_frames = spec_frames[1:]
        self._channel, self._parent_pid = channel, parent_pid
        self._stood_still_s = silence_s * STOOD_STILL_SHARE
        self._turns: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Frames] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[int, Future[Any]] = {}
        self._host: WorkerHost | None = None
        self._early: list[WorkerMessage] = []

    def run(self) -> None:
        """Construct the classes, then run calls until the controller closes this worker."""
        _start_thread("beat", self._beat)
        _start_thread("calls", self._read)
        sender = _start_thread("answers", self._send_answers)
        made: Future[Any] = Future()
        try:
            self._make()
            made.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the controller gets a constructor's SystemExit, too
            made.set_exception(error)
        kind, frames = outcome_frames(made, "the constructor")
        with suppress(OSError):  # the reading thread notices that the controller is gone
            self._channel.send(STARTED, 0, [kind.encode(), *frames])
        if self._host is not None:
            while (work := self._turns.get()) is not None:
                with suppress(KeyboardInterrupt):  # raised by a method: its call has failed with it
                    work()
            self._host.close(0.0)
        self._answers.put(None)
        sender.join()

    def _make(self) -> None:
        host = WorkerHost(
            replace(self._spec, classes=read_classes(self._class_frames)), socket.gethostname(), self._turns.put
        )
        host.make()
        with self._lock:
            self._host = host
            for message in self._early:
                self._take(host, message)

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                with self._lock:
                    if self._host is not None:
                        self._take(self._host, message)
                    else:
                        self._early.append(message)
        except BaseException:  # such as a lack of memory: without this thread the worker could not continue
            traceback.print_exc()
            raise
        finally:
            _end_group()

    def _take(self, host: WorkerHost, message: WorkerMessage) -> None:
        if message.kind == CALL:
            self._call(host, message)
        elif message.kind == CANCEL:
            future = self._running.get(message.number)
            if future is not None:
                future.cancel()
        elif message.kind == CLOSE:
            self._turns.put(None)

    def _call(self, host: WorkerHost, message: WorkerMessage) -> None:
        method = bytes(message.frames[0]).decode()
        try:
            future = host.call(read_call(message.frames[1:], method))
        except InvalidInput as error:
            future = failed_future(error)
        self._running[message.number] = future
        future.add_done_callback(partial(self._answer, message.number, method))

    def _answer(self, number: int, method: str, ended: "Future[Any]") -> None:
        self._running.pop(number, None)
        kind, frames = outcome_frames(ended, method)
        frames = [kind.encode(), *frames]
        # Often called in the reading thread, which must never wait for a controller that itself waits to send.
        is_small = sum(map(len, frames)) <= SMALL_BYTES
        with suppress(OSError):  # the reading thread notices that the controller is gone
            if not (is_small and self._channel.send_at_leisure(OUTCOME, number, frames)):
                self._answers.put((number, frames))

    def _send_answers(self) -> None:
        while (answer := self._answers.get()) is not None:
            with suppress(OSError):  # see `run`
                self._channel.send(OUTCOME, *answer)

    def _vitals(self) -> Vitals:
        return self._host.vitals if self._host else Vitals(socket.gethostname(), os.getpid(), rss_bytes())

    def _beat(self) -> None:
        every = threading.Event()
        while True:
            # Re-armed with each beat, so it fires only when this thread cannot run either.
            faulthandler.dump_traceback_later(self._stood_still_s, exit=True)
            if os.getppid() != self._parent_pid:
                _end_group()
            with suppress(OSError):
                self._channel.send_at_leisure(VITALS, 0, to_frames(self._vitals()))
            every.wait(self._beat_s)


def main(arguments: list[str]) -> None:
    """Run a worker until the controller closes it or is gone."""
    descriptor, parent_pid = map(int, arguments)
    skip_httpx_command()
    os.set_inheritable(descriptor, False)  # so that child processes do not keep it open
    channel = WorkerChannel(socket.socket(fileno=descriptor))
    spec = channel.receive()
    if spec is not None:
        ChildProcess(channel, parent_pid, spec.frames).run()
    faulthandler.cancel_dump_traceback_later()


def _start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"worker {name}", daemon=True)
    thread.start()
    return thread


def _end_group() -> None:
    """Kill this process and its child processes, because the controller is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
