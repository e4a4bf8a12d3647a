"""One call of one worker until it has ended for good: repeated as its method says, within its deadline."""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.groups.group_workers import GroupWorkers
from forebay.workers.members.worker_errors import WorkerLost
from forebay.workers.members.worker_spec import MethodCall, RemoteFailure

ChooseRank = Callable[[Collection[int]], int]
"""Which worker, after those where it has failed already."""


class RepeatedCall:
    """Sends a call, again where it may be repeated, and says how it has ended."""

    def __init__(self, workers: GroupWorkers, call: MethodCall, *, choose: ChooseRank, retries: int) -> None:
        self.outcome: Future[Any] = Future()
        self.rank = -1
        """Where it ran last."""
        self._workers, self._call, self._choose, self._left = workers, call, choose, retries
        self._failed_on: list[int] = []
        self._inner: Future[Any] | None = None
        self._until_s = None if call.deadline_s is None else time.monotonic() + call.deadline_s
        self._send()
        self.outcome.add_done_callback(self._cancelled)

    @property
    def _left_s(self) -> float | None:
        return None if self._until_s is None else max(self._until_s - time.monotonic(), 0.0)

    def _send(self) -> None:
        self.rank = self._choose(self._failed_on)
        if self.rank in self._failed_on:
            self._workers.revive(self.rank, self._left_s)
        self._inner = self._workers.send(self.rank, replace(self._call, deadline_s=self._left_s))
        self._inner.add_done_callback(self._ended)
        self._cancelled(self.outcome)

    def _ended(self, inner: "Future[Any]") -> None:
        error = None if inner.cancelled() else inner.exception()
        if error is not None and self._left > 0 and self._may_repeat(error):
            self._left -= 1
            self._failed_on.append(self.rank)
            # Starting a worker anew takes its time, and replies of others come in by this thread.
            threading.Thread(target=self._again, args=(error,), name="worker group retry", daemon=True).start()
            return
        with suppress(Exception):  # ended meanwhile: late, or cancelled
            if inner.cancelled():
                self.outcome.cancel()
            elif isinstance(error, TimeoutError):
                self.outcome.set_exception(self._call.late())
            elif error is not None:
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(inner.result())

    def _again(self, error: BaseException) -> None:
        try:
            if not self.outcome.done():
                self._send()
        except Exception as refused:  # noqa: BLE001 - it is the caller's, as any failure of the call
            with suppress(Exception):  # cancelled meanwhile
                self.outcome.set_exception(self._call.late() if isinstance(refused, TimeoutError) else refused)
        if isinstance(error, WorkerLost):  # another one may have the call by now; this one is missing all the same
            with suppress(Exception):  # whoever calls it next hears of it
                self._workers.revive(error.rank, None)

    def _may_repeat(self, error: BaseException) -> bool:
        if self.outcome.done() or self._workers.is_closed:
            return False
        if isinstance(error, RemoteFailure):
            return not isinstance(error.error, InvalidInput)
        return isinstance(error, WorkerLost)

    def _cancelled(self, outcome: "Future[Any]") -> None:
        if outcome.cancelled() and self._inner is not None:
            self._inner.cancel()
