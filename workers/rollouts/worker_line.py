"""The lead's end of one worker: messages go out in batches, and news are asked for as long as it lives."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from forebay.workers.backends.abc import MethodCall, RunningWorker, Vitals
from forebay.workers.rollouts.messages import RunReturned, ToLead, ToWorker, TraceLines, encode, for_lead
from forebay.workers.rollouts.sent_traces import ReceivedTrace

ROLE = ""
OnNews = Callable[[Sequence[ToLead]], None]
OnEnd = Callable[[str, BaseException | None], None]
"""Told why, and the error with which it did not even start."""


class WorkerLine:
    """For any thread. ``on_news`` and ``on_end`` are called from others; the latter once, with why nothing comes."""

    def __init__(self, worker: RunningWorker, on_news: OnNews, on_end: OnEnd) -> None:
        self._worker, self._on_news, self._on_end = worker, on_news, on_end
        self._lock = threading.Lock()
        self._outgoing: list[ToWorker] = []
        self._is_sending = True
        self._is_over = False
        self._has_returned = threading.Event()
        self._trace = ReceivedTrace()
        worker.on_lost(self._end)
        worker.started.add_done_callback(self._begin)

    @property
    def vitals(self) -> Vitals:
        """What the worker has said of itself last."""
        return self._worker.vitals

    def send(self, message: ToWorker) -> None:
        """Send one, with others that wait."""
        with self._lock:
            self._outgoing.append(message)
            if self._is_sending or self._is_over:
                return
            self._is_sending = True
        self._send_waiting()

    def close(self, drain_s: float) -> None:
        """End it once its ``run_rollout`` has returned, or ``drain_s`` are over."""
        self._has_returned.wait(drain_s)
        with self._lock:
            self._is_over = True
        self._worker.close(0.0)

    def kill(self) -> None:
        """End it at once."""
        self._worker.kill()

    def _begin(self, started: "Future[None]") -> None:
        if (error := _error_of(started)) is not None:
            self._end(f"it could not be started: {error}", error)
            return
        self._ask()
        self._send_waiting()

    def _call(self, method: str, *args: Any) -> "Future[Any]":
        return self._worker.call(MethodCall(ROLE, method, args))

    def _ask(self) -> None:
        self._call("news").add_done_callback(self._take)

    def _take(self, answered: "Future[bytes]") -> None:
        if (error := _error_of(answered)) is not None:
            self._end(str(error))
            return
        messages = for_lead(answered.result())
        self._on_news([each for each in messages if not isinstance(each, TraceLines | RunReturned)])
        for message in messages:  # here, since the job is over as a rule when the last ones come
            if isinstance(message, TraceLines):
                self._trace.append(message)
            elif isinstance(message, RunReturned):
                self._note_returned(message.trace)
        if not self._is_over and not self._has_returned.is_set():  # only now: another thread may have the next answer
            self._ask()

    def _send_waiting(self) -> None:
        with self._lock:
            messages, self._outgoing = self._outgoing, []
            self._is_sending = bool(messages)
        if messages:
            self._call("tell", encode(messages)).add_done_callback(self._sent)

    def _sent(self, answered: "Future[None]") -> None:
        if (error := _error_of(answered)) is not None:
            self._end(str(error))
        else:
            self._send_waiting()

    def _note_returned(self, trace: str) -> None:
        self._trace.close()
        self._has_returned.set()
        if trace:
            self._end(trace)

    def _end(self, reason: str, error: BaseException | None = None) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._has_returned.set()  # nor will it ever
        self._trace.close()
        self._on_end(reason, error)


def _error_of(future: "Future[Any]") -> BaseException | None:
    try:
        return future.exception(0)
    except CancelledError as error:
        return error
