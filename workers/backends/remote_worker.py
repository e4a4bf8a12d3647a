"""The controller's handle of a worker in another process: the common part of processes and Ray."""

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from typing import Any

from forebay.workers.backends.watch import WorkerWatch
from forebay.workers.backends.wire import Frames, call_frames, read_outcome
from forebay.workers.members.worker_errors import WorkerError, WorkerLost
from forebay.workers.members.worker_spec import MethodCall, WorkerSpec, failed_future


class RemoteWorker(ABC):
    """Sends calls with their deadlines, and notifies all waiters when the worker is gone.

    The code that removes a call from ``_pending`` must end its future.
    """

    def __init__(self, spec: WorkerSpec, watch: WorkerWatch, *, out_of_band: bool) -> None:
        """``out_of_band``: large buffers of arguments are sent as separate frames."""
        self.spec = spec
        self._watch, self._out_of_band = watch, out_of_band
        self.started: Future[None] = Future()
        """Done when all its classes are constructed."""
        self.started.set_running_or_notify_cancel()  # so that no waiter can cancel it
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Future[Any], MethodCall]] = {}
        self._calls_end_with: BaseException | None = None
        self._is_closing = False
        self._lost_because = ""
        self._is_over = False
        self._listeners: list[Callable[[str], None]] = []

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run a method, as ``RunningWorker`` describes."""
        if self._is_closing:
            return failed_future(WorkerError(f"worker {self.spec.rank} takes no more calls: its group was closed"))
        try:
            frames = call_frames(call, self.spec.classes, out_of_band=self._out_of_band)
        except Exception as error:  # noqa: BLE001 - pickling may raise anything; passed to the caller
            return failed_future(error)
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._calls_end_with is not None:
                return failed_future(self._calls_end_with)
            self._pending[number] = future, call
        future.add_done_callback(partial(self._see_cancelled, number))
        if call.deadline_s is not None:
            due_s = time.monotonic() + call.deadline_s
            self._watch.at(due_s, future.done, lambda: self._fail_call(number, call.late()))
        self._send_call(number, call.method, frames)
        return future

    def on_lost(self, notify: Callable[[str], None]) -> None:
        """Call ``notify`` once, with the reason, when the worker is gone without having been closed."""
        with self._lock:
            if not self._is_over:
                self._listeners.append(notify)
                return
        if not self._is_closing:
            notify(self._lost_because)

    def kill(self) -> None:
        """End it at once."""
        self._lose("it was killed by its controller")

    @abstractmethod
    def _lose(self, reason: str) -> None:
        """End the worker for this reason."""

    @abstractmethod
    def _send_call(self, number: int, method: str, frames: Frames) -> None:
        """Send a call with this number."""

    @abstractmethod
    def _cancel(self, number: int) -> None:
        """Cancel a sent call in the worker."""

    def _drain(self, drain_s: float) -> bool:
        """Wait up to ``drain_s`` for all calls. Returns whether all have ended."""
        with self._lock:
            futures = [future for future, _ in self._pending.values()]
        return not wait(futures, drain_s).not_done

    def _end_call(self, number: int, kind: str, frames: Sequence[Any]) -> None:
        """End a call with its outcome."""
        if (sent := self._pop_call(number)) is None:
            return
        future, call = sent
        try:
            value = read_outcome(kind, frames, call.method)
        except CancelledError:  # not by its caller, whose cancel would have removed it here
            future.set_exception(WorkerLost(self.spec.rank, "it was closed"))
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            future.set_exception(error)
        else:
            future.set_result(value)

    def _fail_call(self, number: int, error: BaseException) -> None:
        """Fail a call."""
        if (sent := self._pop_call(number)) is not None:
            sent[0].set_exception(error)

    def _fail_start(self, error: BaseException) -> None:
        """Fail all calls with the error of its start. The worker ends, but is not reported as lost."""
        self._is_closing = True
        self._end_calls(error)

    def _tell_end(self) -> None:
        """Fail its calls and notify listeners: the worker is gone because of ``_lost_because``."""
        self._end_calls(WorkerLost(self.spec.rank, self._lost_because))
        with self._lock:
            self._is_over = True
            listeners, self._listeners = self._listeners, []
        for notify in () if self._is_closing else listeners:
            notify(self._lost_because)

    def _end_calls(self, error: BaseException) -> None:
        """Fail pending and future calls. Only the first error counts."""
        with self._lock:
            self._calls_end_with = error = self._calls_end_with or error
            numbers = list(self._pending)
        with suppress(InvalidStateError):  # it has already started
            self.started.set_exception(error)
        for number in numbers:
            self._fail_call(number, error)

    def _pop_call(self, number: int) -> "tuple[Future[Any], MethodCall] | None":
        with self._lock:
            sent = self._pending.pop(number, None)
        return sent if sent is not None and sent[0].set_running_or_notify_cancel() else None

    def _see_cancelled(self, number: int, future: "Future[Any]") -> None:
        with self._lock:
            sent = self._pending.pop(number, None) if future.cancelled() else None
        if sent is not None:
            future.set_running_or_notify_cancel()  # or `_drain` would wait for its end
            self._cancel(number)
