"""What the calls between the lead of a run and its workers carry, as msgpack. No sample is among it."""

from typing import Literal, TypeVar

import msgspec

from forebay.core.weight_versions import AnnouncedWeights

Span = tuple[str, int, int]
"""What a rollout waited for before it was sent: name of the phase, nanoseconds after its beginning, and how long."""


class _Part(msgspec.Struct, array_like=True, gc=False):
    """What all have in common."""


class JobState(_Part):
    """How the run is; sent whenever it changes."""

    is_held: bool
    is_paused: bool
    step: int
    is_clock_running: bool
    weights: AnnouncedWeights | None


class JobOrder(_Part):
    """A job of the lead: the ``number``-th one of its ``run_rollout``."""

    number: int
    run_id: str
    group_size: int
    group_timeout_s: float
    group_deadline_s: float
    captures: bool
    queue_size: int
    num_reward_workers: int
    addresses: list[tuple[str, str]]
    """That the worker has to reach, where it may be on another machine: each after the field that says it."""
    state: JobState


class Order(_Part):
    """A rollout to run. Times are in seconds, but for those of the trace."""

    uid: str
    row: bytes
    """The line of the input."""
    row_number: int
    epoch: int
    number: int
    attempt: int
    left_s: float
    """Until its group is closed at the latest."""
    engine: str | None
    cap_tokens: int | None
    span: str
    """The id of its attempt in the trace."""
    lasted: int
    """Nanoseconds since it was chosen, ``waits`` among them."""
    waits: list[Span]


class Done(_Part):
    """A rollout has ended, and its samples wait in the worker for their slot; ``broken`` and ``closed`` have none."""

    status: Literal["completed", "failed", "broken", "closed"]
    tokens: list[int]
    """That each of its attempts here has sampled."""
    counters: dict[str, int]
    """Of its recorded turns."""
    error: str


class TraceLines(_Part):
    """Of the trace of a worker that has no run's folder: whole lines, and the head of their file."""

    head: bytes
    lines: bytes


class WorkerStatus(_Part):
    """How a worker is, and what is new since its last report."""

    moves: dict[str, tuple[str | None, int]]
    """The engine of each rollout that has moved, and its attempt; None for no engine."""
    servers: list[tuple[str, bool]]
    """Engines that do not answer (true), or do again."""
    waits_for_engine: bool
    blocked_s: float
    """For how long the event loop of the user's code has stood still, and in which line."""
    blocked_at: str
    is_gone: bool
    """The buffer wants nothing any more."""
    failure: str
    """Why the worker cannot go on with the job, or ""."""
    trace: list[TraceLines]


T = TypeVar("T")

encode = msgspec.msgpack.encode


def decode(body: bytes, kind: type[T]) -> T:
    """What was encoded as this."""
    return msgspec.msgpack.decode(body, type=kind)
