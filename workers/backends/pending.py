"""The calls that a worker has not answered yet, by number, whatever carries them there."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, NamedTuple

from forebay.workers.members.host import late
from forebay.workers.members.worker_errors import WorkerLost
from forebay.workers.members.worker_spec import MethodCall


class Sent(NamedTuple):
    """One call, and what its caller holds of it."""

    future: "Future[Any]"
    call: MethodCall


class PendingCalls:
    """Whoever takes a call out is the one to end its future. From any thread."""

    def __init__(self, rank: int, cancel: Callable[[int], None]) -> None:
        """``cancel`` is called with the number of a call that its caller has cancelled."""
        self._rank, self._cancel = rank, cancel
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sent: dict[int, Sent] = {}
        self._lost_because: str | None = None

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, future: "Future[Any]", call: MethodCall) -> int | None:
        """The number under which to send it; none if the worker is lost, and the future has ended with that."""
        with self._lock:
            if self._lost_because is None:
                number = next(self._numbers)
                self._sent[number] = Sent(future, call)
            else:
                number = None
        if number is None:
            future.set_exception(WorkerLost(self._rank, str(self._lost_because)))
        else:
            future.add_done_callback(partial(self._see_end, number))
        return number

    def end(self, number: int, read: Callable[[MethodCall], Any]) -> None:
        """A call was answered: ``read`` gives its value, or raises what it failed with."""
        sent = self._take(number)
        if sent is None or not sent.future.set_running_or_notify_cancel():
            return
        try:
            value = read(sent.call)
        except CancelledError:  # not by its caller, who would have ended it here
            sent.future.set_exception(WorkerLost(self._rank, "it was closed"))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            sent.future.set_exception(error)
        else:
            sent.future.set_result(value)

    def fail(self, number: int, error: BaseException) -> None:
        """A call came to nothing."""

        def raise_it(_: MethodCall) -> None:
            raise error

        self.end(number, raise_it)

    def end_late(self, number: int) -> None:
        """The deadline of a call has passed."""
        sent = self._take(number)
        if sent is not None and sent.future.set_running_or_notify_cancel():
            sent.future.set_exception(late(sent.call))

    def lose(self, reason: str) -> None:
        """The worker is gone: so are its calls, and all that come later."""
        with self._lock:
            self._lost_because = self._lost_because or reason
            numbers = list(self._sent)
        for number in numbers:
            self.fail(number, WorkerLost(self._rank, self._lost_because))

    def drain(self, drain_s: float) -> bool:
        """Wait so long until all of them have ended; whether they have."""
        with self._lock:
            futures = [sent.future for sent in self._sent.values()]
        return not wait(futures, drain_s).not_done

    def _take(self, number: int) -> Sent | None:
        with self._lock:
            return self._sent.pop(number, None)

    def _see_end(self, number: int, future: "Future[Any]") -> None:
        if future.cancelled() and self._take(number) is not None:
            future.set_running_or_notify_cancel()  # or `drain` would wait for it to its end
            self._cancel(number)
