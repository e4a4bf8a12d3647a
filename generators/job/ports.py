"""What a job works with, and where its rollouts run: in this process, in workers, or in models where it is simulated.

A worker that takes rollouts of a job sees it from its side: as a ``JobMember`` with ``MemberParts``.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.clock import ActiveClock
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import Policy
from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.pool import Call, EnginePool
from forebay.generators.buffer_link.abc import JobBuffer, Link, Plan
from forebay.generators.job.group_feed import Schedule
from forebay.generators.job.replayed_groups import ReplayedGroups
from forebay.generators.job.reporter import Reporter, Totals
from forebay.generators.rollouts.open_group import OpenGroup, StepBarrier
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.generators.rollouts.rollout_trace import RolloutTrace, RolloutTraces
from forebay.telemetry.tracing.stall_watch import StallWatch
from forebay.telemetry.tracing.tracer import Tracer

if TYPE_CHECKING:
    from forebay.generators.rollouts.attempts import RolloutRunner


class JobEngines(Protocol):
    """Where calls go: an ``EnginePool``."""

    def announce(self, weights: AnnouncedWeights | None) -> None:
        """The trainer has said this last of the engines' weights."""

    async def when_up(self) -> Sequence[str]:
        """The addresses of those that answer, the same object as long as they are the same; waits while none does."""

    async def load_at(self, url: str) -> EngineLoad | None:
        """What the engine there is busy with; None where it does not say."""

    async def abort(self, rid_prefix: str, calls: Iterable[Call] = ()) -> None:
        """Stop ``calls`` in flight, and whatever else has this prefix."""

    async def stop(self, calls: Callable[[], Iterable[Call]], limit_s: float | None = ...) -> None:
        """Have the engines end ``calls()`` until there are none; who has asked gets what there was by then."""


class JobRunner(Protocol):
    """What runs rollouts: a ``RolloutRunner``."""

    async def when_ready(self) -> None:
        """Return when there is somebody to run them."""

    async def samples(
        self, group: OpenGroup, number: int, trace: RolloutTrace, rollout_slot: RolloutSlot
    ) -> list[Sample]:
        """The samples of one, the main one last. Raises ``RolloutBroken``, ``RolloutLost``, ``GroupClosed``."""


class JobWriter(Protocol):
    """What takes samples: an ``AsyncWriter``."""

    async def write(self, sample: Sample) -> None:
        """Take one, once there is room."""

    async def watch(self) -> None:
        """Return once it is closed; raises why nothing can be written any more."""

    async def close(self) -> None:
        """Send what waits."""


@dataclass(frozen=True)
class JobContext:
    """What a job has wherever its rollouts run; all of it is open."""

    plan: Plan
    link: Link
    pool: EnginePool
    reporter: Reporter
    clock: ActiveClock
    hold: StepBarrier
    loads: EngineLoads
    tracer: Tracer
    queue_size: int
    """Finished samples that may wait to be written."""
    num_reward_workers: int
    """Processes that may judge at once, if they are needed."""


@dataclass(frozen=True)
class JobPlaces:
    """What a job has of the places where its rollouts run."""

    pool: JobEngines
    runner: JobRunner
    writer: JobWriter
    traces: RolloutTraces


@dataclass(frozen=True)
class JobParts:
    """What a job works with; all of it is open already, and closed by whoever opened it."""

    plan: Plan
    schedule: Schedule
    link: JobBuffer
    pool: JobEngines
    runner: JobRunner
    writer: JobWriter
    reporter: Reporter
    clock: ActiveClock
    hold: StepBarrier
    policy: Policy
    loads: EngineLoads
    traces: RolloutTraces
    replayed: ReplayedGroups | None = None
    """What another run has recorded of the schedule's groups, and what is left of them."""
    adjusts_places: bool = False
    """Whether the number of places is found out while it runs."""


class RolloutPlaces(Protocol):
    """Of a run whose rollouts run in workers."""

    async def need(self, field: str, url: Callable[[], Awaitable[str]]) -> None:
        """The jobs that follow need this address in workers, too; ``field`` or setting says it.

        It is asked for only where workers may be on other machines. Raises ``InvalidInput`` if those cannot reach it.
        """

    def opened(self, around: JobContext) -> AbstractAsyncContextManager[JobPlaces]:
        """Within this the workers take rollouts of one job."""

    def end_job(self, totals: Totals | None) -> None:
        """The job is over: what stands behind it is run in the workers as well. None: it has failed."""

    def close(self, limit_s: float) -> None:
        """``run_rollout`` has returned; so will those of the workers, which have so long for it."""


@dataclass(frozen=True)
class MemberShare:
    """What a worker has to know before it can run rollouts of a job."""

    plan: Plan
    queue_size: int
    num_reward_workers: int
    worker: int
    """Its number."""


@dataclass(frozen=True)
class MemberParts:
    """What a worker runs the rollouts of one job with."""

    pool: EnginePool
    runner: "RolloutRunner"
    writer: AsyncWriter
    traces: RolloutTraces
    watch: StallWatch
    """Of the event loop in which they run."""
    takes_failed: bool
    """Whether the buffer takes failed samples, and forks."""
    engine_wait_s: float


OpenMember = Callable[[MemberShare, Callable[[bool], None]], AbstractAsyncContextManager[MemberParts]]
"""Opens them; the second argument is told when no engine answers, and when one does again."""


class JobMember(Protocol):
    """Of one worker."""

    async def serve(self, open_parts: OpenMember) -> Totals:
        """Take rollouts of the next job until the lead has ended it; what it counted."""
