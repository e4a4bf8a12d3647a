"""Where the rollouts of a job run: in this process, or in workers, which a member of them sees from its side."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.clock import ActiveClock
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.engines.ring import EngineRing
from forebay.generators.buffer_link.abc import Link, Plan
from forebay.generators.job.parts import JobEngines, JobRunner, JobWriter
from forebay.generators.job.reporter import Reporter, Totals
from forebay.generators.rollouts.open_group import Hold
from forebay.generators.rollouts.rollout_trace import RolloutTraces
from forebay.telemetry.tracing.tracer import Tracer

if TYPE_CHECKING:
    from forebay.generators.rollouts.attempts import RolloutRunner


@dataclass(frozen=True)
class JobSurroundings:
    """What a job has wherever its rollouts run; all of it is open."""

    plan: Plan
    link: Link
    ring: EngineRing
    reporter: Reporter
    clock: ActiveClock
    hold: Hold
    loads: EngineLoads
    tracer: Tracer
    queue_size: int
    """Finished samples that may wait to be written."""
    num_reward_workers: int
    """Processes that may judge at once, if they are needed."""


@dataclass(frozen=True)
class JobPlaces:
    """What a job has of the places where its rollouts run."""

    ring: JobEngines
    runner: JobRunner
    writer: JobWriter
    traces: RolloutTraces


class RolloutPlaces(Protocol):
    """Of a run whose rollouts run in workers."""

    async def need(self, field: str, url: Callable[[], Awaitable[str]]) -> None:
        """The jobs that follow need this address in workers, too; ``field`` or setting says it.

        It is asked for only where workers may be on other machines. Raises ``InvalidInput`` if those cannot reach it.
        """

    def opened(self, around: JobSurroundings) -> AbstractAsyncContextManager[JobPlaces]:
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

    ring: EngineRing
    runner: "RolloutRunner"
    writer: AsyncWriter
    traces: RolloutTraces
    takes_failed: bool
    """Whether the buffer takes failed samples, and forks."""
    engine_wait_s: float


OpenMember = Callable[[MemberShare, Callable[[bool], None]], AbstractAsyncContextManager[MemberParts]]
"""Opens them; the second argument is told when no engine answers, and when one does again."""


class JobMember(Protocol):
    """Of one worker."""

    async def serve(self, open_parts: OpenMember) -> Totals:
        """Take rollouts of the next job until the lead has ended it; what it counted."""
