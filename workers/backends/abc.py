"""Interfaces between a worker group and the backend that runs its workers."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from forebay.workers.members.worker_spec import MethodCall, RemoteFailure, Vitals, WorkerSpec

__all__ = [
    "MethodCall",
    "NodeRoom",
    "RemoteFailure",
    "RunningWorker",
    "Vitals",
    "WorkerBackend",
    "WorkerSpec",
    "close_all",
]


class RunningWorker(Protocol):
    """The controller's handle of a started worker."""

    @property
    def vitals(self) -> Vitals:
        """Last vitals of the worker."""

    @property
    def started(self) -> "Future[None]":
        """Done when all its classes are constructed; fails with a constructor's error, or with ``WorkerLost``."""

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run a method on the worker: ``async`` ones concurrently on its event loop, others one after another.

        The future fails with ``RemoteFailure`` (the method raised), ``TimeoutError`` (deadline), ``WorkerLost`` (the
        process is gone) or ``InvalidInput`` (names the argument, or the result, that cannot be pickled). Cancelling it
        cancels an ``async`` method, and drops a queued one.
        """

    def on_lost(self, notify: Callable[[str], None]) -> None:
        """Call ``notify`` with the reason once, from any thread, when the process is gone or silent."""

    def close(self, drain_s: float) -> None:
        """Refuse new calls, wait up to ``drain_s`` for those in flight, then end the process. May be called twice."""

    def kill(self) -> None:
        """End the process at once."""


class Closable(Protocol):
    """A worker, or a handle of one."""

    def close(self, drain_s: float) -> None:
        """Wait up to ``drain_s`` for calls in flight, then end it."""


def close_all(workers: Iterable[Closable], drain_s: float, limit_s: float | None = None) -> None:
    """Close workers concurrently. Returns when all are closed, or after ``limit_s``.

    Each may use its full ``drain_s``: closing many of them one after another would take minutes.
    """
    closing = [threading.Thread(target=each.close, args=(drain_s,), daemon=True) for each in workers]
    for thread in closing:
        thread.start()
    until_s = None if limit_s is None else time.monotonic() + limit_s
    for thread in closing:
        thread.join(None if until_s is None else max(until_s - time.monotonic(), 0.0))


@dataclass(frozen=True)
class NodeRoom:
    """Resources of one node that are free for workers."""

    node: str
    cpus: float
    resources: Mapping[str, float] = field(default_factory=dict)


class WorkerBackend(Protocol):
    """One way of running workers."""

    name: str

    def start(self, specs: Sequence[WorkerSpec]) -> Sequence[RunningWorker]:
        """Start workers, and return while they come up. Raises ``PlacementFailed`` if they can never be placed.

        A single spec of a larger group is a restarted worker.
        """

    def free(self) -> Sequence[NodeRoom] | None:
        """Free resources of each node; None if the backend does not count resources."""
