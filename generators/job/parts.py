"""What a job asks of those it works with: the real ones, or models of them where a run is simulated."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from forebay.client.sample_writer.outbox import Sample
from forebay.core.task_row import TaskRow
from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.ring import Call
from forebay.generators.buffer_link.abc import ClosedGroups, ProgressReport
from forebay.generators.rollouts.open_group import OpenGroup
from forebay.generators.rollouts.rollout_trace import RolloutTrace
from forebay.generators.rollouts.seat import Seat


class JobRows(Protocol):
    """The input: a ``RowFile``."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    def rows(self, epoch: int = 0) -> Iterator[TaskRow]:
        """One pass over them. Raises ``InputRefused``."""


class JobBuffer(Protocol):
    """Where samples go, which says what is needed: a ``Link``."""

    has_feed: bool
    takes_failed: bool

    async def report(self, progress: ProgressReport) -> None:
        """Tell how far the run is."""

    async def closed_groups(self, before: ClosedGroups) -> ClosedGroups:
        """Wait for what is news after the answer ``before``."""


class JobEngines(Protocol):
    """Where calls go: an ``EngineRing``."""

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

    async def samples(self, group: OpenGroup, number: int, trace: RolloutTrace, seat: Seat) -> list[Sample]:
        """The samples of one, the main one last. Raises ``RolloutBroken``, ``RolloutLost``, ``GroupClosed``."""


class JobWriter(Protocol):
    """What takes samples: an ``AsyncWriter``."""

    async def write(self, sample: Sample) -> None:
        """Take one, once there is room."""

    async def watch(self) -> None:
        """Return once it is closed; raises why nothing can be written any more."""

    async def close(self) -> None:
        """Send what waits."""
