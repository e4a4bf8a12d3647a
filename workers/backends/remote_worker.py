"""The end that a controller holds of a worker in another process: what processes and Ray have in common."""

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
    """Sends calls, each with its deadline, and tells everybody who waits for something of it that it is gone.

    Whoever takes a call out of ``_pending`` is the one to end its future.
    """

    def __init__(self, spec: WorkerSpec, watch: WorkerWatch, *, out_of_band: bool) -> None:
        """``out_of_band``: large buffers of arguments are sent by themselves."""
        self.spec = spec
        self._watch, self._out_of_band = watch, out_of_band
        self.started: Future[None] = Future()
        """Done when all its classes are made."""
        self.started.set_running_or_notify_cancel()  # many may wait for it: none of them cancels it
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Future[Any], MethodCall]] = {}
        self._calls_end_with: BaseException | None = None
        self._is_closing = False
        self._lost_because = ""
        self._is_over = False
        self._listeners: list[Callable[[str], None]] = []

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run a method there; see ``RunningWorker``."""
        if self._is_closing:
            return failed_future(WorkerError(f"worker {self.spec.rank} takes no more calls: its group was closed"))
        try:
            frames = call_frames(call, self.spec.classes, out_of_band=self._out_of_band)
        except Exception as error:  # noqa: BLE001 - whatever pickling raises is the caller's
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
        """Have ``notify`` called once, with the reason, when the worker is gone and nobody has closed it."""
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
        """End it, because of this."""

    @abstractmethod
    def _send_call(self, number: int, method: str, frames: Frames) -> None:
        """Send a call under this number."""

    @abstractmethod
    def _cancel(self, number: int) -> None:
        """Have a call that was sent cancelled there."""

    def _drain(self, drain_s: float) -> bool:
        """Wait so long until all calls have ended; whether they have."""
        with self._lock:
            futures = [future for future, _ in self._pending.values()]
        return not wait(futures, drain_s).not_done

    def _end_call(self, number: int, kind: str, frames: Sequence[Any]) -> None:
        """A call was answered."""
        if (sent := self._pop_call(number)) is None:
            return
        future, call = sent
        try:
            value = read_outcome(kind, frames, call.method)
        except CancelledError:  # not by its caller, who would have ended it here
            future.set_exception(WorkerLost(self.spec.rank, "it was closed"))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        else:
            future.set_result(value)

    def _fail_call(self, number: int, error: BaseException) -> None:
        """A call came to nothing."""
        if (sent := self._pop_call(number)) is not None:
            sent[0].set_exception(error)

    def _fail_start(self, error: BaseException) -> None:
        """Its classes could not be made: it ends, and is not lost, and its calls fail with that."""
        self._is_closing = True
        self._end_calls(error)

    def _tell_end(self) -> None:
        """It is gone, because of ``_lost_because``: so are its calls, and all who listen hear of it."""
        self._end_calls(WorkerLost(self.spec.rank, self._lost_because))
        with self._lock:
            self._is_over = True
            listeners, self._listeners = self._listeners, []
        for notify in () if self._is_closing else listeners:
            notify(self._lost_because)

    def _end_calls(self, error: BaseException) -> None:
        """Those that were sent, and all to come. The first word counts."""
        with self._lock:
            self._calls_end_with = error = self._calls_end_with or error
            numbers = list(self._pending)
        with suppress(InvalidStateError):  # it has started
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
            future.set_running_or_notify_cancel()  # or `_drain` would wait for it to its end
            self._cancel(number)
