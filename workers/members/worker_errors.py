"""Errors of workers, derived from ``forebay.core.errors``.

WorkerError                      500  a worker group could not do what was asked
├── WorkerFailed                      a method raised on one or more workers
├── WorkerLost                   503  the process of a worker is gone
└── PlacementFailed              503  no node has room for a worker
"""

from collections.abc import Mapping

from forebay.core.errors import ForebayError


class WorkerError(ForebayError):
    """A worker group could not do what was asked."""

    code = "worker_error"


class WorkerFailed(WorkerError):
    """A method raised on one or more workers. ``traces`` has the traceback of each, by rank."""

    code = "worker_failed"

    def __init__(self, method: str, traces: Mapping[int, str], num_workers: int) -> None:
        ranks = ", ".join(map(str, sorted(traces)))
        lines = "\n".join(
            f"--- rank {rank} of {num_workers}\n{trace.rstrip()}" for rank, trace in sorted(traces.items())
        )
        super().__init__(f"{method} failed on rank {ranks}:\n{lines}")
        self.method, self.traces, self.num_workers = method, dict(traces), num_workers


class WorkerLost(WorkerError):
    """The process of a worker is gone, or was silent for too long."""

    code = "worker_lost"
    status = 503

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"worker {rank} is lost: {reason}")
        self.rank, self.reason = rank, reason


class PlacementFailed(WorkerError):
    """No node has room for a worker. The message names what was requested and what is free."""

    code = "placement_failed"
    status = 503
