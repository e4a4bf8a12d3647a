"""What a worker and its controller exchange: the worker's spec, a call, vitals, a failure."""

import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from forebay.workers.members.worker import ClassWithInitArgs


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_number: int
    """Index of its node in the pool. Workers with the same number share a machine."""
    classes: Mapping[str, ClassWithInitArgs[Any]]
    """Classes by role, constructed in this order. A group of one class has the single role ``""``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added to those of its process."""
    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources by name. Only Ray uses these and ``cpus``."""
    master: tuple[str, int] | None = None
    """Address and port for the rendezvous of a group's workers; None if they need none."""

    @property
    def variables(self) -> dict[str, str]:
        """``env`` and the variables that ``torch.distributed`` reads."""
        if self.master is None:
            return dict(self.env)
        host, port = self.master
        place = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        return {**self.env, **{name: str(value) for name, value in place.items()}}


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        port: int = bound.getsockname()[1]
    return port


def worker_specs(
    process_on_nodes: Sequence[int],
    classes: Mapping[str, ClassWithInitArgs[Any]],
    *,
    env: Mapping[str, str] | None = None,
    cpus: float = 1.0,
    resources: Mapping[str, float] | None = None,
    master: tuple[str, int] | None = None,
) -> list[WorkerSpec]:
    """Specs by rank; ``process_on_nodes`` has the number of workers for each node."""
    places = [(node, local, count) for node, count in enumerate(process_on_nodes) for local in range(count)]
    return [
        WorkerSpec(
            rank=rank,
            world_size=len(places),
            local_rank=local,
            local_world_size=count,
            node_number=node,
            classes=classes,
            env=env or {},
            cpus=cpus,
            resources=resources or {},
            master=master,
        )
        for rank, (node, local, count) in enumerate(places)
    ]


@dataclass(frozen=True)
class MethodCall:
    """One call of one method on one worker."""

    role: str
    method: str
    """Name of the method, or of ``function`` for ``execute_func_rank_zero``."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """Called with the worker as first argument, in place of a method."""
    deadline_s: float | None = None
    """At the deadline an ``async`` method is cancelled; others run on. The caller's future ends either way."""

    def late(self) -> TimeoutError:
        """The error for missing the deadline."""
        return TimeoutError(f"{self.method} took longer than {self.deadline_s:g} s")


def failed_future(error: BaseException) -> "Future[Any]":
    """A future that has already failed with this error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


@dataclass(frozen=True)
class Vitals:
    """What a worker reports periodically about itself."""

    node: str
    pid: int
    rss_bytes: int
    silent_s: float = 0.0
    """Seconds since its last message."""
    blocked_s: float = 0.0
    """Seconds for which its event loop has been blocked; 0.0 while it runs."""
    blocked_at: str = ""
    """The line that blocks it: ``file:line in function``."""


class RemoteFailure(Exception):
    """What a method raised: ``error`` itself if it could be pickled, and ``trace``, the traceback as text."""

    def __init__(self, error: BaseException | None, trace: str) -> None:
        super().__init__(trace)
        self.error, self.trace = error, trace

    @classmethod
    def of(cls, error: BaseException) -> "RemoteFailure":
        """Wrap an error that was just caught. Its trace begins below the frame that caught it."""
        below = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
        return cls(error, "".join(traceback.format_exception(type(error), error, below)))

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteFailure, (self.error, self.trace))
