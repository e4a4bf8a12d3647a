"""What passes between the lead of a run and its workers: batches of these, as msgpack. No sample is among them.

To a worker: ``BeginJob``, ``EndJob``, ``LeadState``, ``Assignment``, ``GrantSlot``, ``EndRollout``, ``StopCalls``.
To the lead: all others.
"""

from typing import Any, Literal

import msgspec

from forebay.core.weight_versions import AnnouncedWeights

Span = tuple[str, int, int]
"""What a rollout waited for before it was sent: name of the phase, nanoseconds after its beginning, and how long."""


class _Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """What all have in common."""


class LeadState(_Message):
    """How the run is; sent whenever it changes."""

    is_held: bool
    is_paused: bool
    step: int
    is_clock_running: bool
    weights: AnnouncedWeights | None


class BeginJob(_Message):
    """The lead has begun a job: the ``number``-th one of its ``run_rollout``."""

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
    state: LeadState


class EndJob(_Message):
    """It is over, with these totals; None: it has failed, and so ends the worker."""

    number: int
    totals: dict[str, Any] | None


class Assignment(_Message):
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
    slot: int | None = None
    """To which its sample goes without asking: another copy of it was lost."""


class GrantSlot(_Message):
    """The sample of a rollout is used."""

    uid: str
    slot: int


class EndRollout(_Message):
    """Nobody needs a rollout any more, or its sample: it ends, if it runs still."""

    uid: str
    ending: Literal["failed", "aborted"]


class StopCalls(_Message):
    """Have the engines end the calls of these rollouts in flight: so it is known what they have sampled."""

    request: int
    uids: list[str]
    are_over: bool
    """Nobody needs them any more: their streams end too, and no other call goes out. Else only what is answered in one
    piece ends, for as long as the run is held."""


class JobReady(_Message):
    """The worker takes rollouts of this job."""

    number: int


class RolloutMoved(_Message):
    """A rollout talks to this engine now, or to none."""

    uid: str
    engine: str | None
    attempt: int


class RolloutDone(_Message):
    """A rollout has ended, and its samples wait for their slot; ``broken`` and ``closed`` ones have none."""

    uid: str
    status: Literal["completed", "failed", "broken", "closed"]
    tokens: list[int]
    """That each of its attempts here has sampled."""
    counters: dict[str, int]
    """Of its recorded turns."""
    error: str
    num_turns: int
    seconds: float
    num_bytes: int
    """Of its samples, as far as these are text."""


class SampleJudged(_Message):
    """The sample of a rollout is on the buffer's disk, or was refused for good."""

    uid: str


class CallsStopped(_Message):
    """The answer to ``StopCalls``: what each rollout has sampled by now, in its present attempt."""

    request: int
    tokens: dict[str, int]


class EnginesAnswer(_Message):
    """Whether any engine answers this worker."""

    is_waiting: bool


class EngineChanged(_Message):
    """An engine does not answer, or does again."""

    url: str
    is_failing: bool


class LoopBlocked(_Message):
    """The event loop of the user's code stands still, for so long, in this line; 0.0 once it turns again."""

    seconds: float
    line: str


class JobBroken(_Message):
    """The worker cannot go on with this job: the buffer wants nothing any more (``is_gone``), or it has failed."""

    is_gone: bool
    message: str


class OutOfReach(_Message):
    """The worker's machine cannot reach this address (field that says it, URL) of those that it needs."""

    address: tuple[str, str]


class TraceLines(_Message):
    """Of the trace of a worker that has no run's folder: whole lines, and the head of their file."""

    head: bytes
    lines: bytes


class RunReturned(_Message):
    """The last one: its ``run_rollout`` has returned; with the traceback of what that raised, or ""."""

    trace: str


ToWorker = BeginJob | EndJob | LeadState | Assignment | GrantSlot | EndRollout | StopCalls
ToLead = (
    JobReady
    | RolloutMoved
    | RolloutDone
    | SampleJudged
    | CallsStopped
    | EnginesAnswer
    | EngineChanged
    | LoopBlocked
    | JobBroken
    | OutOfReach
    | TraceLines
    | RunReturned
)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(list[ToWorker])
_to_lead = msgspec.msgpack.Decoder(list[ToLead])


def encode(messages: "list[ToWorker] | list[ToLead]") -> bytes:
    """A batch."""
    return _encoder.encode(messages)


def for_worker(batch: bytes) -> list[ToWorker]:
    """What the lead has sent."""
    return _to_worker.decode(batch)


def for_lead(batch: bytes) -> list[ToLead]:
    """What a worker has sent."""
    return _to_lead.decode(batch)
