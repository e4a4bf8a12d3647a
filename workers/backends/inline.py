"""Workers in this process: a debugger stops in their methods, and a test needs no other process."""

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
    """Runs every worker here. A method that is not ``async`` runs in the thread of its caller, before the call returns.

    Variables of ``env``, and those that say which worker runs, are added to this process, and taken back when the group
    is closed. ``async`` methods, which run side by side, find those of whichever worker had its turn last.
    """

    name = "inline"

    def start(self, specs: Sequence[WorkerSpec]) -> Sequence[RunningWorker]:
        """Make them all, one after another."""
        return [InlineWorker(spec) for spec in specs]

    def free(self) -> Sequence[NodeRoom] | None:
        """Nothing is counted."""
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
        self.started.set_running_or_notify_cancel()  # many may wait for it: none of them cancels it
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
        """As they are now."""
        return self._host.vitals

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run a method; see ``RunningWorker``."""
        if self._lost:
            return failed_future(WorkerLost(self._rank, self._lost))
        inner = self._host.call(call)
        if inner.done():
            return inner
        # A future of its own: the host cancels that of an ``async`` method when the worker is killed.
        outer: Future[Any] = Future()
        outer.add_done_callback(lambda _: inner.cancel())
        inner.add_done_callback(partial(self._end, outer))
        return outer

    def on_lost(self, notify: Callable[[str], None]) -> None:
        """Have ``notify`` called when it is killed; at once if it was."""
        with self._lock:
            if not self._lost:
                self._notify.append(notify)
                return
        notify(self._lost)

    def close(self, drain_s: float) -> None:
        """Take no more calls, and wait so long for those in flight."""
        self._host.close(drain_s)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _added.release(self._variables)

    def kill(self) -> None:
        """As if its process had died: calls in flight are lost. A method that computes goes on to its end."""
        with self._lock:
            if self._lost or self._is_closed:
                return
            self._lost = "it was killed"
        self.close(0.0)
        for notify in self._notify:
            notify(self._lost)

    def _run_in_turn(self, work: Callable[[], None]) -> None:
        with self._turn:  # a method may call another one of its own worker
            os.environ.update(self._variables)  # another worker's turn has left its own there
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
    """Variables that workers have added to the environment of this process; they stay until the last of these ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[str, str | None] = {}
        self._num_users: Counter[str] = Counter()

    def add(self, variables: Mapping[str, str]) -> None:
        """One worker more has these."""
        with self._lock:
            for name in variables:
                self._before.setdefault(name, os.environ.get(name))
            self._num_users.update(variables.keys())
            os.environ.update(variables)

    def release(self, variables: Mapping[str, str]) -> None:
        """One worker less."""
        with self._lock:
            self._num_users.subtract(variables.keys())
            for name in variables:
                if self._num_users[name] == 0 and (before := self._before.pop(name)) is not None:
                    os.environ[name] = before
                elif self._num_users[name] == 0:
                    os.environ.pop(name, None)


_added = _AddedVariables()
