"""Runs workers in this process, for debuggers and tests."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from forebay.workers.backends.abc import MethodCall, NodeRoom, RemoteFailure, RunningWorker, Vitals, WorkerSpec
from forebay.workers.members.host import WorkerHost
from forebay.workers.members.worker_errors import WorkerLost
from forebay.workers.members.worker_spec import failed_future


class InlineBackend:
    """Runs every worker in this process. Methods that are not ``async`` run in the caller's thread before it continues.

    Variables of ``env`` and those of the running worker are set in this process, and restored when the group is closed.
    ``async`` methods run concurrently and see the variables of the worker that ran last.
    """

    name = "inline"

    def start(self, specs: Sequence[WorkerSpec]) -> Sequence[RunningWorker]:
        """Construct the workers, one after another."""
        return [InlineWorker(spec) for spec in specs]

    def free(self) -> Sequence[NodeRoom] | None:
        """None: resources are not counted."""
        return None


class InlineWorker:
    """One worker of this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._rank, self._variables = spec.rank, spec.variables
        self._turn = threading.RLock()
        self._lock = threading.Lock()
        self._lost = ""
        self._is_closed = False
        self._notify: list[Callable[[str], None]] = []
        self.started: Future[None] = Future()
        self.started.set_running_or_notify_cancel()  # so that no waiter can cancel it
        _added.add(self._variables)
        self._host = WorkerHost(spec, socket.gethostname(), self._run_in_turn)
        try:
            self._host.make()
        except RemoteFailure as failure:
            self.started.set_exception(failure)
        else:
            self.started.set_result(None)

    @property
    def vitals(self) -> Vitals:
        """Current vitals."""
        return self._host.vitals

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run a method, as ``RunningWorker`` describes."""
        if self._lost:
            return failed_future(WorkerLost(self._rank, self._lost))
        inner = self._host.call(call)
        if inner.done():
            return inner
        # A separate future: the host cancels the inner one of an ``async`` method when the worker is killed.
        outer: Future[Any] = Future()
        outer.add_done_callback(lambda _: inner.cancel())
        inner.add_done_callback(partial(self._end, outer))
        return outer

    def on_lost(self, notify: Callable[[str], None]) -> None:
        """Call ``notify`` when the worker is killed, at once if it already was."""
        with self._lock:
            if not self._lost:
                self._notify.append(notify)
                return
        notify(self._lost)

    def close(self, drain_s: float) -> None:
        """Refuse new calls, and wait up to ``drain_s`` for those in flight."""
        self._host.close(drain_s)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _added.release(self._variables)

    def kill(self) -> None:
        """Act as if its process had died: calls in flight are lost. A running method still runs to its end."""
        with self._lock:
            if self._lost or self._is_closed:
                return
            self._lost = "it was killed"
        self.close(0.0)
        for notify in self._notify:
            notify(self._lost)

    def _run_in_turn(self, work: Callable[[], None]) -> None:
        with self._turn:  # re-entrant: a method may call another method of its worker
            os.environ.update(self._variables)  # another worker may have replaced them
            work()

    def _end(self, outer: "Future[Any]", inner: "Future[Any]") -> None:
        if not outer.set_running_or_notify_cancel():
            return
        if inner.cancelled():
            outer.set_exception(WorkerLost(self._rank, self._lost or "it was closed"))
        elif (error := inner.exception()) is not None:
            outer.set_exception(error)
        else:
            outer.set_result(inner.result())


class _AddedVariables:
    """Variables that workers added to this process's environment. Each stays until its last worker ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[str, str | None] = {}
        self._num_users: Counter[str] = Counter()

    def add(self, variables: Mapping[str, str]) -> None:
        """Add the variables of a worker."""
        with self._lock:
            for name in variables:
                self._before.setdefault(name, os.environ.get(name))
            self._num_users.update(variables.keys())
            os.environ.update(variables)

    def release(self, variables: Mapping[str, str]) -> None:
        """Release the variables of a worker that has ended."""
        with self._lock:
            self._num_users.subtract(variables.keys())
            for name in variables:
                if self._num_users[name] == 0 and (before := self._before.pop(name)) is not None:
                    os.environ[name] = before
                elif self._num_users[name] == 0:
                    os.environ.pop(name, None)


_added = _AddedVariables()
