"""Messages between a run process and its buffer, and the base class of links."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from forebay.client.calls.async_transport import AsyncTransport
from forebay.client.calls.flow import ENDLESS_S, TRANSIENT, Call, Flow, ServerReply, answered
from forebay.client.sample_writer.outbox import Sample, WriteLimits
from forebay.client.sample_writer.protocol import Writing
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.errors import BufferFull, ForebayError
from forebay.core.ids import MAX_ID_LENGTH, InstanceId
from forebay.core.weight_versions import AnnouncedWeights
from forebay.replay.group_frames import RecordedBodies

if TYPE_CHECKING:  # pydantic takes a moment to import, and each inspected generator file would wait for it
    from forebay.core.scheduling.oversampling import Oversampling
    from forebay.core.scheduling.scheduler import Scheduler

TIMEOUT_S = 90.0
GONE = frozenset({404, 410})
"""Statuses meaning that the run is over: nothing sent to it will be used."""
BUSY = TRANSIENT | {500}
"""Statuses meaning that the same request can succeed later."""
NO_LIMIT_BYTES = 1 << 62

GroupKey = tuple[InstanceId, int]
"""Instance and epoch."""

NoteFull = Callable[[bool], object]
"""Called with True when a full buffer has refused a call, and with False when the call is repeated."""


class RunGone(ForebayError):
    """The buffer accepts nothing more for this run, which was stopped or has ended."""

    code = "run_gone"
    status = 410


class LinkRefused(ForebayError):
    """The buffer rejected a request of this run process."""

    code = "link_refused"
    status = 502


@dataclass(frozen=True)
class Step:
    """A step as reported by the server: its number, weights, counted groups and discarded groups."""

    number: int
    weight_version: int | None = None
    weights: AnnouncedWeights | None = None
    """The trainer's latest announcement; None if the buffer does not report it."""
    counted: Collection[str] = ()
    discarded: Collection[str] = ()


@dataclass(frozen=True)
class ReplayTask:
    """How a run process uses the recording of another run."""

    mode: str
    """With ``only``, nothing is generated; with ``cache`` and ``repeat``, missing samples are."""
    judges_again: bool
    """Whether the reward function scores the recorded samples again."""
    groups: Sequence[GroupKey] | None = None
    """The only groups to run, in order; None for the whole input."""

    @property
    def generates(self) -> bool:
        """Whether missing samples are generated."""
        return self.mode != "only"


@dataclass(frozen=True)
class Plan:
    """The work of a run process, as planned by the server. Durations are in seconds."""

    run_id: str
    group_size: int
    group_timeout_s: float = 300.0
    group_deadline_s: float = 3_600.0
    closed: frozenset[GroupKey] = frozenset()
    """Groups that need no more samples."""
    taken: Mapping[GroupKey, frozenset[int]] = field(default_factory=dict)
    """Filled slots of each incomplete group."""
    uids: frozenset[str] = frozenset()
    """Uids of stored samples that differ from the uids of their slots."""
    last_closed: int = 0
    """Position in the feed of the last closed group."""
    oversampling: "Oversampling | None" = None
    scheduler: "Scheduler | None" = None
    step: Step | None = None
    """The trainer's current step."""
    captures: bool = True
    """Whether engine calls request token ids and logprobs."""
    replay: ReplayTask | None = None

    @property
    def groups_per_step(self) -> int | None:
        return self.oversampling.groups_per_step if self.oversampling else None

    @property
    def num_spares(self) -> int:
        """Number of rollouts per group beyond its slots."""
        return self.oversampling.num_spares(self.group_size) if self.oversampling else 0


MAX_REPORTED_GROUPS = 500
"""Groups in each list of one report. The server rejects reports above this limit or the next two."""
MAX_WORKERS = 1_024
MAX_TEXT = 512
"""Maximum characters of each text in a ``WorkerReport``."""
MAX_COUNT_NAMES = 256
"""Limit over all processes of a run, because each report that changes a count journals all of them."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
CountName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
ReportedId = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)] | int
# Epochs fit the store's 64 bits: a value that the store rejects would force every run to be reloaded.
ReportedKeys = Annotated[
    Sequence[tuple[ReportedId, Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]],
    msgspec.Meta(max_length=MAX_REPORTED_GROUPS),
]
"""Groups, each as its instance and epoch."""


class WorkerReport(msgspec.Struct, frozen=True):
    """State of one worker of the run. The server checks the bounds."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    node: Text
    """Name of the worker's machine; "" until it is known."""
    state: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,16}\Z")]
    num_in_flight: Count
    """Rollouts that the worker is running."""
    num_restarts: Count
    """Earlier workers with this number."""
    rss_bytes: Count
    blocked_s: Annotated[float, msgspec.Meta(ge=0, le=1 << 62)]
    """Seconds for which user code has blocked the event loop; ``blocked_at`` is the line."""
    blocked_at: Text
    reason: Text
    """Why the worker cannot be placed, or why the previous one ended."""


class ProgressReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run process's report about itself. Fields that are None or left out keep their last reported value."""

    opened: ReportedKeys = ()
    idle: ReportedKeys = ()
    """Groups whose last rollout in flight has ended: their deadlines are paused."""
    busy: ReportedKeys = ()
    """Idle groups that have a rollout in flight again."""
    short: ReportedKeys = ()
    """Groups with empty slots that get no more samples. The server closes them with the samples they have."""
    waiting_for_engine: bool | None = None
    held: bool | None = None
    num_groups_total: Count | None = None
    is_last_slot_reported: bool | None = None
    process_id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    counts: Annotated[Mapping[CountName, Count], msgspec.Meta(max_length=MAX_COUNT_NAMES)] | None = None
    """Totals of all counters of the process ``process_id``."""
    workers: Annotated[Sequence[WorkerReport], msgspec.Meta(max_length=MAX_WORKERS)] | None = None
    is_gateway: bool = False
    """Whether the gateway sent this report: it has its own counts and its own wait for engines."""


@dataclass(frozen=True)
class ClosedGroups:
    """One answer of the feed: ids of closed groups, and whether the run is over.

    The next request sends ``last``, ``seen``, ``is_paused`` and ``is_still``. ``step`` is the trainer's current step.
    """

    group_ids: Sequence[str] = field(default_factory=list)
    last: int = 0
    is_run_over: bool = False
    step: Step | None = None
    seen: int = 0
    is_paused: bool = False
    """Whether the engines are paused, for example during a weight update."""
    is_still: bool = False
    """Whether the server's deadlines are paused."""


def ignore(_: object) -> None:
    """Do nothing: the default of callbacks."""


class JobBuffer(Protocol):
    """The methods of ``Link`` that a job uses; simulated runs implement them without a server."""

    has_feed: bool
    takes_failed: bool

    async def report(self, progress: ProgressReport, note_full: NoteFull = ignore) -> None:
        """Report the progress of the run."""

    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:
        """Wait for changes since the answer ``before``."""


class Link(ABC):
    """Connection to one buffer. Calls are repeated until answered, and raise ``RunGone`` once the run is over."""

    has_feed: bool
    """Whether the buffer reports closed groups."""
    takes_failed: bool
    """Whether failed samples may be sent: slime's own buffer becomes unreadable after one."""

    def __init__(self, url: str) -> None:
        self.transport = AsyncTransport(url, token=None)

    async def close(self) -> None:
        """Close the connections."""
        await self.transport.close()

    def writer(self, max_waiting: int, on_judged: Callable[[Sample], object] = ignore) -> "RunWriter":
        """Return a writer for finished samples, which blocks its callers while ``max_waiting`` samples are queued.

        This is how a full buffer slows generation down. ``on_judged`` is called with each sample that the buffer has
        accepted or rejected.
        """
        writing = self._writing(max_waiting + 1)  # one more is being sent
        writing.outbox.on_judged = on_judged
        return RunWriter(self.transport, writing)

    @abstractmethod
    def _writing(self, max_waiting: int) -> "RunWriting":
        """Return the protocol by which samples are sent."""

    @abstractmethod
    async def plan(self, fallback: Plan) -> Plan:
        """Return the plan of the run, or ``fallback`` if the buffer has no plans."""

    @abstractmethod
    async def report(self, progress: ProgressReport, note_full: NoteFull = ignore) -> None:
        """Report the progress of the run."""

    async def recorded(self, key: GroupKey) -> RecordedBodies | None:  # noqa: ARG002 - overrides use it
        """Return the recording of a group in a replay; None if none of it can be reused."""
        raise LinkRefused("this buffer has no recordings", hint="replay requires a Forebay server")

    @abstractmethod
    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:
        """Wait up to 25 s for changes since the answer ``before``."""


class RunWriter(AsyncWriter):
    """Writer of a run. Also accepts encoded samples."""

    async def write_encoded(self, sample: Sample, body: bytes) -> None:
        """Write ``sample``, given already encoded as ``body``."""
        await self._wait(lambda: self._outbox.has_room)
        self._outbox.put(sample, body)


class RunWriting(Writing):
    """Sends each sample until it is acknowledged or permanently rejected, or the run is gone. Never times out."""

    no_room = BUSY
    # One sample may cause the rejection of a whole batch: the others must not wait for it.
    splits_without_room = True

    def __init__(self, path: str, max_waiting: int, max_samples: int = 64) -> None:
        # Finished samples are sent at once: a reader waiting for a group should not also wait for a batch.
        limits = WriteLimits(max_samples, max_age_s=0.0, max_waiting=max_waiting, max_waiting_bytes=NO_LIMIT_BYTES)
        super().__init__(path, limits, on_refused=_ignore)

    def hopeless(self, reply: ServerReply, error: ForebayError) -> ForebayError | None:  # noqa: ARG002 - the status suffices
        return RunGone(f"the buffer returned {reply.status}: {text_of(reply)}") if reply.status in GONE else None


def _ignore(sample: Sample, error: ForebayError) -> None:
    """Do nothing: the rejection is already logged, and the run continues."""


def asked(call: Call, note_full: NoteFull = ignore) -> Flow[ServerReply]:
    """Repeat a call about the run until it is answered. Raises ``RunGone``."""
    reply = yield from _noting_full(answered(call, ENDLESS_S, BUSY), note_full)
    if reply.status in GONE:
        raise RunGone(f"the buffer returned {reply.status} for this run: {text_of(reply)}")
    return reply


def _noting_full(flow: Flow[ServerReply], note_full: NoteFull) -> Flow[ServerReply]:
    answer: Any = None
    while True:
        try:
            effect = flow.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(effect, Call):
            note_full(False)
        answer = yield effect
        if isinstance(answer, ServerReply):
            note_full(answer.status == BufferFull.status)


def text_of(reply: ServerReply) -> str:
    """Beginning of a reply's body, as text for messages."""
    return reply.body[:300].decode(errors="replace")
