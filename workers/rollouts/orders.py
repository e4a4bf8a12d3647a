"""Messages between the lead of a run and its workers, as msgpack. They contain no samples."""

from typing import Literal, TypeVar

import msgspec

from forebay.core.weight_versions import AnnouncedWeights

Span = tuple[str, int, int]
"""A wait of a rollout before it was sent: name of the phase, its start after the beginning and its length, in ns."""


class _Part(msgspec.Struct, array_like=True, gc=False):
    """Base of all messages."""


class JobState(_Part):
    """State of the run, sent whenever it changes."""

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
    """Field and URL of each address that the worker must reach, if it may be on another machine."""
    state: JobState
    defers_groups: bool = False
    """Whether samples wait in the worker until their group is complete."""


class Order(_Part):
    """A rollout to run. Times are in seconds, those of the trace in nanoseconds."""

    uid: str
    row: bytes
    """Line of the input."""
    row_number: int
    epoch: int
    number: int
    attempt: int
    left_s: float
    """Seconds until its group is closed at the latest."""
    engine: str | None
    cap_tokens: int | None
    span: str
    """Id of its attempt in the trace."""
    lasted: int
    """Nanoseconds since it was chosen, ``waits`` included."""
    waits: list[Span]


class Done(_Part):
    """End of a rollout. Its samples wait in the worker for a slot; ``broken`` and ``closed`` have no samples."""

    status: Literal["completed", "failed", "broken", "closed"]
    tokens: list[int]
    """Tokens that each of its attempts here has sampled."""
    counters: dict[str, int]
    """Counters of its recorded turns."""
    error: str


class TraceLines(_Part):
    """Trace of a worker without the run's folder: whole lines, and the head of their file."""

    head: bytes
    lines: bytes


class WorkerStatus(_Part):
    """State of a worker, and the changes since its last report."""

    moves: dict[str, tuple[str | None, int]]
    """Engine (None for no engine) and attempt of each rollout that has moved, by uid."""
    servers: list[tuple[str, bool]]
    """Engines that stopped answering (true), or answer again (false)."""
    waits_for_engine: bool
    blocked_s: float
    """Seconds for which the event loop of the user's code has been blocked; ``blocked_at`` is the line."""
    blocked_at: str
    is_gone: bool
    """The buffer's run is over: it accepts nothing any more."""
    failure: str
    """Why the worker cannot continue the job, or ""."""
    trace: list[TraceLines]


T = TypeVar("T")

encode = msgspec.msgpack.encode


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a message of this type."""
    return msgspec.msgpack.decode(body, type=kind)
