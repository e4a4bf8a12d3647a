"""The end that a controller holds of a worker in another process: what processes and Ray have in common."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from forebay.workers.backends.pending import PendingCalls
from forebay.workers.backends.watch import WorkerWatch
from forebay.workers.backends.wire import Frames, call_frames
from forebay.workers.members.futures import failed_future
from forebay.workers.members.worker_errors import WorkerError, WorkerLost
from forebay.workers.members.worker_spec import MethodCall, WorkerSpec


class RemoteWorker(ABC):
    """Sends calls, each with its deadline, and tells everybody who waits for something of it that it is gone."""

    def __init__(self, spec: WorkerSpec, watch: WorkerWatch, *, out_of_band: bool) -> None:
        """``out_of_band``: large buffers of arguments are sent by themselves."""
        self.spec = spec
        """What it was started with; of a worker that was found, without its classes."""
        self._watch, self._out_of_band = watch, out_of_band
        self._pending = PendingCalls(spec.rank, self._cancel)
        self._started: Future[None] = Future()
        self._started.set_running_or_notify_cancel()  # many may wait for it: none of them cancels it
        self._lock = threading.Lock()
        self._is_closing = False
        self._has_started_ended = False
        self._lost_because = ""
        self._is_over = False
        self._listeners: list[Callable[[str], None]] = []

    @property
    def started(self) -> "Future[None]":
        """Done when all its classes are made."""
        return self._started

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run a method there; see ``RunningWorker``."""
        if self._is_closing:
            return failed_future(WorkerError(f"worker {self.spec.rank} takes no more calls: its group was closed"))
        try:
            frames = call_frames(call, self.spec.classes, out_of_band=self._out_of_band)
        except Exception as error:  # noqa: BLE001 - whatever pickling raises is the caller's
            return failed_future(error)
        future: Future[Any] = Future()
        number = self._pending.add(future, call)
        if number is not None:
            if call.deadline_s is not None:
                due_s = time.monotonic() + call.deadline_s
                self._watch.at(due_s, future.done, partial(self._pending.end_late, number))
            self._send_call(number, call.method, frames)
        return future

    def on_lost(self, notify: Callable[[str], None]) -> None:
        """Have ``notify`` called once, with the reason, when the worker is gone and nobody has closed it."""
        with self._lock:
            if not self._is_over:
                self._listeners.append(notify)
                return
        if not self._is_closing:
            notify(self._lost_because)

    @abstractmethod
    def _send_call(self, number: int, method: str, frames: Frames) -> None:
        """Send a call under this number."""

    @abstractmethod
    def _cancel(self, number: int) -> None:
        """Have a call that was sent cancelled there."""

    def _see_started(self, error: BaseException | None = None) -> None:
        """Its classes are made, or could not be. The first word counts."""
        with self._lock:
            if self._has_started_ended:
                return
            self._has_started_ended = True
        # Without the lock: whoever hears of it may close the worker.
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)

    def _tell_end(self) -> None:
        """It is gone, because of ``_lost_because``: so are its calls, and all who listen hear of it."""
        self._pending.lose(self._lost_because)
        self._see_started(WorkerLost(self.spec.rank, self._lost_because))
        with self._lock:
            self._is_over = True
            listeners, self._listeners = self._listeners, []
        for notify in () if self._is_closing else listeners:
            notify(self._lost_because)
