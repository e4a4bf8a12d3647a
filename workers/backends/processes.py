"""Runs workers in separate processes on this machine, each connected by a socket pair.

A worker starts in a fresh interpreter, so its controller needs no ``if __name__ == "__main__"``. No worker outlives
its controller: see ``forebay.workers.backends.child``.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from forebay.core.child_process import KILLING_S, python_argv, signal_group
from forebay.workers.backends.abc import NodeRoom
from forebay.workers.backends.channel import (
    CALL,
    CANCEL,
    CLOSE,
    OUTCOME,
    SPEC,
    STARTED,
    VITALS,
    WorkerChannel,
    WorkerMessage,
)
from forebay.workers.backends.endings import count_oom_kills, ending_of
from forebay.workers.backends.remote_worker import RemoteWorker
from forebay.workers.backends.watch import WorkerWatch, beat_s
from forebay.workers.backends.wire import (
    Frames,
    from_frames,
    read_outcome,
    spec_frames,
)
from forebay.workers.members.worker_spec import Vitals, WorkerSpec

STARTING_S = 60.0
"""Shortest limit for the first message of a process: a busy machine loads Python slowly."""
STOOD_STILL_SHARE = 0.8
"""Share of ``worker_silence_s`` after which a worker's process ends itself if none of its threads could run."""


class ProcessesBackend:
    """Starts each worker in a separate process on this machine."""

    name = "processes"

    def __init__(self, worker_silence_s: float = 10.0) -> None:
        """``worker_silence_s``: silence after which a process is considered dead and killed."""
        self._silence_s = worker_silence_s
        self._watch = WorkerWatch(beat_s(worker_silence_s))

    def start(self, specs: Sequence[WorkerSpec]) -> Sequence["ProcessWorker"]:
        """Start workers, and return while they come up. Raises ``InvalidInput`` for what cannot be pickled."""
        frames = spec_frames(specs, list(sys.path), self._silence_s, beat_s(self._silence_s))
        started: list[ProcessWorker] = []
        try:
            started.extend(ProcessWorker(spec, self._watch, self._silence_s) for spec in specs)
        except BaseException:  # such as no more processes or descriptors
            for worker in started:
                worker.kill()
            raise
        for worker, own in zip(started, frames, strict=True):
            worker.send_spec(own)
        return started

    def free(self) -> Sequence[NodeRoom] | None:
        """None: resources are not counted."""
        return None


class ProcessWorker(RemoteWorker):
    """One process, and the thread in the controller that reads its messages and waits for its end."""

    def __init__(self, spec: WorkerSpec, watch: WorkerWatch, silence_s: float) -> None:
        super().__init__(spec, watch, out_of_band=True)
        self._silence_s = silence_s
        self._oom_kills = count_oom_kills()
        self._process, sock = _start_process(spec)
        self._channel = WorkerChannel(sock)
        self._vitals = Vitals(socket.gethostname(), self._process.pid, 0)
        self._heard_at_all = False
        self._looked_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, name=f"worker {spec.rank} replies", daemon=True)
        self._reader.start()
        watch.add(self)

    @property
    def vitals(self) -> Vitals:
        """Last vitals of the worker."""
        return replace(self._vitals, silent_s=time.monotonic() - self._channel.heard_s)

    def close(self, drain_s: float) -> None:
        """Refuse new calls, wait up to ``drain_s`` for those in flight, then end the process."""
        self._is_closing = True
        is_drained = self._drain(drain_s)
        self._send(CLOSE, 0, [])
        if threading.current_thread() is self._reader:  # in a callback of a call: this thread itself waits for the end
            return
        # The event loop and ``atexit`` get time to finish. A method or constructor still running in the main thread
        # has already had its time.
        self._reader.join(KILLING_S if is_drained and self.started.done() else 1.0)
        if self._reader.is_alive():
            self.kill()
        self._reader.join()

    def send_spec(self, frames: Frames) -> None:
        """Send its spec, the first message that it reads."""
        self._send(SPEC, 0, frames)

    def look(self) -> None:
        """Check that the process is alive and not silent."""
        with self._lock:
            if self._is_over:
                return
            has_ended = _has_ended(self._process.pid)
        if has_ended:
            # A child process of it may still have the socket open.
            if not self._channel.has_more():
                self._channel.hang_up()
            return
        now_s = time.monotonic()
        if now_s - self._looked_s > self._silence_s / 2:  # this process was suspended, perhaps with the worker
            self._channel.heard_s = now_s
        self._looked_s = now_s
        silent_s = now_s - self._channel.heard_s
        limit_s = self._silence_s if self._heard_at_all else max(self._silence_s, STARTING_S)
        if silent_s > limit_s and not self._channel.has_more():
            self._lose(f"its process was silent for {silent_s:.1f} s")

    def _send(self, kind: bytes, number: int, frames: Frames) -> None:
        try:
            self._channel.send(kind, number, frames)
        except OSError:
            self._channel.hang_up()  # the reading thread finds the reason

    def _send_call(self, number: int, method: str, frames: Frames) -> None:
        self._send(CALL, number, [method.encode(), *frames])

    def _cancel(self, number: int) -> None:
        self._send(CANCEL, number, [])

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._lost_because = self._lost_because or reason
            signal_group(self._process.pid, signal.SIGKILL)
        self._channel.hang_up()

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._heard_at_all = True
                self._take(message)
        except BaseException as error:  # noqa: BLE001 - such as no memory for a result; calls would wait forever
            self._lose(f"a message from it could not be read: {error!r}")
        self._end()

    def _take(self, message: WorkerMessage) -> None:
        frames = message.frames
        if message.kind == OUTCOME:
            self._end_call(message.number, bytes(frames[0]).decode(), frames[1:])
        elif message.kind == VITALS:
            self._vitals = from_frames(frames)
        elif message.kind == STARTED:
            kind = bytes(frames[0]).decode()
            try:
                read_outcome(kind, frames[1:], "the constructor")
            except BaseException as error:  # noqa: BLE001 - a constructor may raise anything
                self._fail_start(error)  # the process ends by itself
            else:
                self.started.set_result(None)

    def _end(self) -> None:
        """Clean up after the socket was closed. Ends the process if it is still alive."""
        self._watch.remove(self)
        silent_s = time.monotonic() - self._channel.heard_s
        if self._is_closing and not self._lost_because:
            _await_exit(self._process.pid, KILLING_S)
        with self._lock:
            # Before wait() frees the process id: its group contains the children that it left behind.
            signal_group(self._process.pid, signal.SIGKILL)
            returncode = self._process.wait()
            if not self._lost_because:
                self._lost_because = self._reason(returncode, silent_s)
            self._is_over = True
        self._channel.close()
        self._tell_end()

    def _reason(self, returncode: int, silent_s: float) -> str:
        if self._is_closing:
            return "it was closed"
        if self._channel.was_cut_short:
            return "its controller was interrupted while it sent a message"
        if returncode == 1 and silent_s > STOOD_STILL_SHARE / 2 * self._silence_s:
            return f"none of its threads could run for {silent_s:.1f} s; its log shows the blocked line"
        return ending_of(returncode, self._oom_kills)


def _start_process(spec: WorkerSpec) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                python_argv("forebay.workers.backends.child", str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **spec.variables},
                pass_fds=(theirs.fileno(),),
                # A process group of its own: its children end with it, and Ctrl-C reaches only the controller.
                process_group=0,
            )
        except BaseException:  # on any error: nothing else would close this end
            ours.close()
            raise
    return process, ours


def _await_exit(pid: int, limit_s: float) -> None:
    """Wait up to ``limit_s`` for the end of a child, without reaping it."""
    until_s = time.monotonic() + limit_s
    while not _has_ended(pid) and time.monotonic() < until_s:
        time.sleep(0.005)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # other code in this process reaps all children
        return True
