"""What a run process says to its buffer, and hears from it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from forebay.client.calls.flow import ENDLESS_S, TRANSIENT, Call, Flow, ServerReply, answered
from forebay.client.calls.transport import AsyncTransport
from forebay.client.sample_writer.outbox import Sample, WriteLimits
from forebay.client.sample_writer.protocol import Writing
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.errors import ForebayError
from forebay.core.ids import MAX_ID_LENGTH, InstanceId
from forebay.core.weight_versions import AnnouncedWeights
from forebay.replay.group_frames import RecordedBodies

if TYPE_CHECKING:  # pydantic takes a moment to import, and each inspected generator file would wait for it
    from forebay.core.scheduling.oversampling import Oversampling
    from forebay.core.scheduling.scheduler import Scheduler

TIMEOUT_S = 90.0
GONE = frozenset({404, 410})
"""Statuses that say: the run is over, nothing sent to it will be used."""
BUSY = TRANSIENT | {500}
"""Statuses that say: the same request is right a little later."""
NO_LIMIT_BYTES = 1 << 62

GroupKey = tuple[InstanceId, int]
"""Instance and epoch."""


class RunGone(ForebayError):
    """The buffer wants nothing more from this run: it was stopped, or it ended."""

    code = "run_gone"
    status = 410


class LinkRefused(ForebayError):
    """The buffer does not understand this run process."""

    code = "link_refused"
    status = 502


@dataclass(frozen=True)
class Step:
    """What the server tells of a step: its number and weights, which groups it has, and which came to nothing."""

    number: int
    weight_version: int | None = None
    weights: AnnouncedWeights | None = None
    """What the trainer has said of them last; None from a buffer that cannot say."""
    counted: Collection[str] = ()
    discarded: Collection[str] = ()


@dataclass(frozen=True)
class ReplayTask:
    """What a run process does with what another run recorded."""

    mode: str
    """``only``: nothing is generated; ``cache`` and ``repeat``: what is missing is."""
    judges_again: bool
    """Whether the rewards are those of the reward function, asked anew."""
    groups: Sequence[GroupKey] | None = None
    """The only groups that there are, in their order; None for all of the input."""

    @property
    def generates(self) -> bool:
        """Whether what is missing is generated."""
        return self.mode != "only"


@dataclass(frozen=True)
class Plan:
    """What a run process is to do, as the server tells it. Durations in seconds."""

    run_id: str
    group_size: int
    group_timeout_s: float = 300.0
    group_deadline_s: float = 3_600.0
    closed: frozenset[GroupKey] = frozenset()
    """Groups for which nothing is to be generated."""
    taken: Mapping[GroupKey, frozenset[int]] = field(default_factory=dict)
    """Incomplete groups, with the slots that are there."""
    uids: frozenset[str] = frozenset()
    """Of the samples there, the uids that are not those of their slots."""
    last_closed: int = 0
    """The number in the feed of the last group that was closed."""
    oversampling: "Oversampling | None" = None
    scheduler: "Scheduler | None" = None
    step: Step | None = None
    """Where the trainer is."""
    captures: bool = True
    """Whether the engines are asked for tokens."""
    replay: ReplayTask | None = None

    @property
    def groups_per_step(self) -> int | None:
        return self.oversampling.groups_per_step if self.oversampling else None

    @property
    def num_spares(self) -> int:
        """Rollouts of a group beyond its slots."""
        return self.oversampling.num_spares(self.group_size) if self.oversampling else 0


MAX_REPORTED_GROUPS = 500
"""Groups in each list of one report; the server refuses more, as it does beyond the next two."""
MAX_WORKERS = 1_024
MAX_TEXT = 512
"""Characters in a text about a worker."""
MAX_COUNT_NAMES = 256
"""Over all processes of a run: each report that changes a count journals all of them."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
CountName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
ReportedId = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)] | int
# An epoch has 64 bits, as the store has it: what the store refuses makes every run be loaded again.
ReportedKeys = Annotated[
    Sequence[tuple[ReportedId, Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]],
    msgspec.Meta(max_length=MAX_REPORTED_GROUPS),
]
"""Groups by instance and epoch."""


class WorkerReport(msgspec.Struct, frozen=True):
    """How one worker of the run is. The bounds are checked by the server."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    node: Text
    """Name of its machine; "" until it is known."""
    state: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,16}\Z")]
    num_in_flight: Count
    """Rollouts that it runs."""
    num_restarts: Count
    """Workers of this number before it."""
    rss_bytes: Count
    blocked_s: Annotated[float, msgspec.Meta(ge=0, le=1 << 62)]
    """For how long the event loop of the user's code has stood still, and in which line."""
    blocked_at: Text
    reason: Text
    """Why there is no place for it, or why the one before it is gone."""


class ProgressReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run process reports of itself. None, or what is left out, leaves what was reported before as it is."""

    opened: ReportedKeys = ()
    idle: ReportedKeys = ()
    """Groups that have no rollout in flight any more: they do not age."""
    busy: ReportedKeys = ()
    """Those of them that have one again."""
    short: ReportedKeys = ()
    """Those for which no sample comes any more, though slots of them are empty: they are closed with what they have."""
    waiting_for_engine: bool | None = None
    held: bool | None = None
    num_groups_total: Count | None = None
    is_last_slot_reported: bool | None = None
    process_id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    counts: Annotated[Mapping[CountName, Count], msgspec.Meta(max_length=MAX_COUNT_NAMES)] | None = None
    """All that the process of this id has counted."""
    workers: Annotated[Sequence[WorkerReport], msgspec.Meta(max_length=MAX_WORKERS)] | None = None
    is_gateway: bool = False
    """The gateway counts, and waits for engines, beside the run's own process."""


@dataclass(frozen=True)
class ClosedGroups:
    """One answer of the feed: ids of closed groups, and whether the run was ended.

    ``last``, ``seen``, ``is_paused`` and ``is_still`` are sent with the next request; ``step`` is where the trainer is.
    """

    group_ids: Sequence[str] = field(default_factory=list)
    last: int = 0
    is_run_over: bool = False
    step: Step | None = None
    seen: int = 0
    is_paused: bool = False
    """The engines stand still, while they are given other weights say."""
    is_still: bool = False
    """The server's deadlines are paused."""


class JobBuffer(Protocol):
    """What a job asks of a ``Link``; a simulated run has a model of one."""

    has_feed: bool
    takes_failed: bool

    async def report(self, progress: ProgressReport) -> None:
        """Tell how far the run is."""

    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:
        """Wait for what is news after the answer ``before``."""


class Link(ABC):
    """The way to one buffer. Calls are made again until they are answered; ``RunGone`` when the run is over."""

    has_feed: bool
    """Whether the buffer tells which groups it closed."""
    takes_failed: bool
    """Whether a failed sample may be sent: slime's own buffer cannot be read any more after one."""

    def __init__(self, url: str) -> None:
        self.transport = AsyncTransport(url, token=None)

    async def close(self) -> None:
        """Let go of the connections."""
        await self.transport.close()

    def writer(self, max_waiting: int, on_judged: Callable[[Sample], object] = lambda _: None) -> "RunWriter":
        """What takes finished samples; when ``max_waiting`` wait, those who bring another wait with them.

        That is how a buffer without room slows generation down. ``on_judged`` is told of each sample that the buffer
        has, or will not take.
        """
        writing = self._writing(max_waiting + 1)  # one more is being offered
        writing.outbox.on_judged = on_judged
        return RunWriter(self.transport, writing)

    @abstractmethod
    def _writing(self, max_waiting: int) -> "RunWriting":
        """How samples are offered."""

    @abstractmethod
    async def plan(self, fallback: Plan) -> Plan:
        """What there is to do; ``fallback`` is the answer of a buffer that cannot say."""

    @abstractmethod
    async def report(self, progress: ProgressReport) -> None:
        """Tell how far the run is."""

    async def recorded(self, key: GroupKey) -> RecordedBodies | None:  # noqa: ARG002 - others look
        """What the recording that the run replays has of a group; None where nothing of it can be used again."""
        raise LinkRefused("this buffer has no recordings", hint="replay needs a Forebay server")

    @abstractmethod
    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:
        """Wait up to 25 s for what is news after the answer ``before``."""


class RunWriter(AsyncWriter):
    """The writer of a run, which takes samples as they were recorded, too."""

    async def write_encoded(self, sample: Sample, body: bytes) -> None:
        """As ``write``, with the bytes that stand for ``sample``."""
        await self._wait(lambda: self._outbox.has_room)
        if self._outbox.put(sample, body):
            self._wake()


class RunWriting(Writing):
    """Offers each sample until it is acknowledged or refused for good, or the run is gone, however long that takes."""

    no_room = BUSY
    # A refusal of a whole batch may be due to one of its samples: the others must not wait for it.
    splits_without_room = True

    def __init__(self, path: str, max_waiting: int, max_samples: int = 64) -> None:
        # What is finished goes out at once: who waits for its group should not wait for a batch as well.
        limits = WriteLimits(max_samples, max_age_s=0.0, max_waiting=max_waiting, max_waiting_bytes=NO_LIMIT_BYTES)
        super().__init__(path, limits, on_refused=_ignore)

    def hopeless(self, reply: ServerReply, error: ForebayError) -> ForebayError | None:  # noqa: ARG002 - the status says it
        return RunGone(f"the buffer answers {reply.status}: {text_of(reply)}") if reply.status in GONE else None


def _ignore(sample: Sample, error: ForebayError) -> None:
    """The log has the refusal, and the run goes on."""


def asked(call: Call) -> Flow[ServerReply]:
    """The answer to a call about the run, made again until there is one. Raises ``RunGone``."""
    reply = yield from answered(call, ENDLESS_S, BUSY)
    if reply.status in GONE:
        raise RunGone(f"the buffer answers {reply.status} for this run: {text_of(reply)}")
    return reply


def text_of(reply: ServerReply) -> str:
    """The beginning of a reply, for people to read."""
    return reply.body[:300].decode(errors="replace")
