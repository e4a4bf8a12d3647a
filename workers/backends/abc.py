"""What a worker group asks of whatever runs its workers."""

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
    """A worker that was started: the end of it that its controller holds."""

    @property
    def vitals(self) -> Vitals:
        """As it was heard of last."""

    @property
    def started(self) -> "Future[None]":
        """Done when all its classes are made; fails with what a constructor raised, or with ``WorkerLost``."""

    def call(self, call: MethodCall) -> "Future[Any]":
        """Run a method there: ``async`` ones side by side on the worker's event loop, others one after another.

        The future fails with ``RemoteFailure`` (raised there), ``TimeoutError`` (deadline), ``WorkerLost`` (the process
        is gone), ``InvalidInput`` (an argument, or the result, cannot be pickled; its name is said). Cancelling it
        cancels an ``async`` method there, and drops one that waits for its turn.
        """

    def on_lost(self, notify: Callable[[str], None]) -> None:
        """Have ``notify`` called once, from any thread, when the process is gone or silent, with the reason."""

    def close(self, drain_s: float) -> None:
        """Take no more calls, wait so long for those in flight, then end the process. May be told twice."""

    def kill(self) -> None:
        """End the process at once."""


class Closable(Protocol):
    """A worker, or what stands for one."""

    def close(self, drain_s: float) -> None:
        """Wait so long for calls in flight, then end it."""


def close_all(workers: Iterable[Closable], drain_s: float, limit_s: float | None = None) -> None:
    """Close these at once; return when all are closed, or ``limit_s`` are over.

    Each has its time to end by itself: one after another, many of them would take minutes.
    """
    closing = [threading.Thread(target=each.close, args=(drain_s,), daemon=True) for each in workers]
    for thread in closing:
        thread.start()
    until_s = None if limit_s is None else time.monotonic() + limit_s
    for thread in closing:
        thread.join(None if until_s is None else max(until_s - time.monotonic(), 0.0))


@dataclass(frozen=True)
class NodeRoom:
    """What one node has left for workers."""

    node: str
    cpus: float
    resources: Mapping[str, float] = field(default_factory=dict)


class WorkerBackend(Protocol):
    """One way of running workers."""

    name: str

    def start(self, specs: Sequence[WorkerSpec]) -> Sequence[RunningWorker]:
        """Start these, and return while they come up. Raises ``PlacementFailed`` if there can be no place for them.

        One spec out of a larger group is a worker that is started anew.
        """

    def free(self) -> Sequence[NodeRoom] | None:
        """What is left on each node; None where nothing is counted."""
