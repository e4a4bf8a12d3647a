"""Interfaces between a job and its surroundings: rollouts run in this process, in workers, or in a simulation.

A worker's side of a job is ``JobMember`` with ``MemberParts``.
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
    """The engines of a job, implemented by ``EnginePool``."""

    def announce(self, weights: AnnouncedWeights | None) -> None:
        """Note the trainer's latest announcement about the engines' weights."""

    async def when_up(self) -> Sequence[str]:
        """Wait until engines answer and return their addresses: the same object until the addresses change."""

    async def load_at(self, url: str) -> EngineLoad | None:
        """Return the load of the engine at ``url``; None if it does not report one."""

    async def abort(self, rid_prefix: str, calls: Iterable[Call] = ()) -> None:
        """Abort ``calls`` in flight, and all other calls with this prefix."""

    async def stop(self, calls: Callable[[], Iterable[Call]], limit_s: float | None = ...) -> None:
        """Make the engines end ``calls()`` until none are left. The callers get what was sampled by then."""


class JobRunner(Protocol):
    """The runner of rollouts, implemented by ``RolloutRunner``."""

    async def when_ready(self) -> None:
        """Wait until rollouts can run, for example until there is a worker."""

    async def samples(
        self, group: OpenGroup, number: int, trace: RolloutTrace, rollout_slot: RolloutSlot
    ) -> list[Sample]:
        """Run one rollout and return its samples, the main one last.

        Raises ``RolloutBroken``, ``RolloutLost`` or ``GroupClosed``.
        """


class JobWriter(Protocol):
    """The writer of samples, implemented by ``AsyncWriter``."""

    async def write(self, sample: Sample) -> None:
        """Queue a sample, waiting for room."""

    async def watch(self) -> None:
        """Return once the writer is closed. Raises the error after which nothing can be written."""

    async def close(self) -> None:
        """Send all queued samples and close the writer."""


@dataclass(frozen=True)
class JobContext:
    """Opened resources of a job, independent of where its rollouts run."""

    plan: Plan
    link: Link
    pool: EnginePool
    reporter: Reporter
    clock: ActiveClock
    hold: StepBarrier
    loads: EngineLoads
    tracer: Tracer
    queue_size: int
    """Maximum number of finished samples waiting to be written."""
    num_reward_workers: int
    """Maximum number of processes for reward functions."""


@dataclass(frozen=True)
class JobPlaces:
    """Opened resources of a job that depend on where its rollouts run."""

    pool: JobEngines
    runner: JobRunner
    writer: JobWriter
    traces: RolloutTraces


@dataclass(frozen=True)
class JobParts:
    """All opened resources of a job. Their opener closes them."""

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
    """In a replay, the source of recorded samples and of the groups that still need rollouts."""
    adjusts_places: bool = False
    """Whether the number of concurrency slots is adjusted during the run."""
    leaves_room: bool = False
    """Whether other runs' calls go first: it keeps one slot per engine while calls queue there."""


class RolloutPlaces(Protocol):
    """The workers in which a run's rollouts run."""

    async def need(self, field: str, url: Callable[[], Awaitable[str]]) -> None:
        """Check that workers can reach an address, which ``field`` or a setting names.

        ``url`` is only called if workers may be on other machines. Raises ``InvalidInput`` if they cannot reach the
        address.
        """

    def opened(self, around: JobContext) -> AbstractAsyncContextManager[JobPlaces]:
        """Let the workers take rollouts of one job inside this context."""

    def end_job(self, totals: Totals | None) -> None:
        """End a job, so that workers continue with the code after it. ``totals`` is None if the job failed."""

    def close(self, limit_s: float) -> None:
        """Give the workers ``limit_s`` seconds to return from ``run_rollout`` after the lead has returned."""


@dataclass(frozen=True)
class MemberShare:
    """Parameters that a worker needs to run rollouts of a job."""

    plan: Plan
    queue_size: int
    num_reward_workers: int
    worker: int
    """Number of the worker."""


@dataclass(frozen=True)
class MemberParts:
    """Opened resources of a worker for one job."""

    pool: EnginePool
    runner: "RolloutRunner"
    writer: AsyncWriter
    traces: RolloutTraces
    watch: StallWatch
    """Watches the event loop in which the rollouts run."""
    takes_failed: bool
    """Whether the buffer accepts failed samples and forks."""
    engine_wait_s: float


OpenMember = Callable[[MemberShare, Callable[[bool], None]], AbstractAsyncContextManager[MemberParts]]
"""Opens a worker's parts. The second argument is called with True when no engine answers, and with False later."""


class JobMember(Protocol):
    """A worker's side of jobs."""

    async def serve(self, open_parts: OpenMember) -> Totals:
        """Run rollouts of the next job until the lead ends it, and return the lead's totals."""
