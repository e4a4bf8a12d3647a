"""What passes between a worker and whoever has started it: how it is made, one call, its signs of life, a failure."""

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
    """Which of the pool's nodes: workers of one number share a machine."""
    classes: Mapping[str, ClassWithInitArgs[Any]]
    """By role; each is made in this order. A group of one class has the single role ``""``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the variables of its process."""
    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom ones, by name: Ray's business, as ``cpus`` is."""
    master: tuple[str, int] | None = None
    """Address and port at which the workers of a group find each other; None where they have no use for that."""

    @property
    def variables(self) -> dict[str, str]:
        """``env``, and the variables with which ``torch.distributed`` finds the group."""
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
    """Of so many workers on each node, by rank."""
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
    """Or ``function``, for ``execute_func_rank_zero``."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """Called with the worker as first argument, in place of a method."""
    deadline_s: float | None = None
    """An ``async`` method is cancelled then, another ends when it likes. The caller's future ends either way."""

    def late(self) -> TimeoutError:
        """The error if it did not end in time."""
        return TimeoutError(f"{self.method} took longer than {self.deadline_s:g} s")


def failed_future(error: BaseException) -> "Future[Any]":
    """One that has ended with this."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


@dataclass(frozen=True)
class Vitals:
    """What a worker says of itself now and then."""

    node: str
    pid: int
    rss_bytes: int
    silent_s: float = 0.0
    """Since it was heard of last."""
    blocked_s: float = 0.0
    """For how long its event loop has stood still; 0.0 while it turns."""
    blocked_at: str = ""
    """The line in which it stands: ``file:line in function``."""


class RemoteFailure(Exception):
    """What a method raised: ``error`` itself if it could be sent, and its ``trace`` as the worker would print it."""

    def __init__(self, error: BaseException | None, trace: str) -> None:
        super().__init__(trace)
        self.error, self.trace = error, trace

    @classmethod
    def of(cls, error: BaseException) -> "RemoteFailure":
        """For an error that was just caught; its trace begins below the frame that caught it."""
        below = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
        return cls(error, "".join(traceback.format_exception(type(error), error, below)))

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteFailure, (self.error, self.trace))
