"""What decides which rollout is started next, and on which engine: asked by the job for every free place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from forebay.core.ids import InstanceId
from forebay.core.scheduling.engine_loads import EngineLoads

if TYPE_CHECKING:  # pydantic takes a moment to import
    from forebay.core.scheduling.scheduler import Scheduler


class RolloutKey(NamedTuple):
    """One rollout: the id of its group, and its number there."""

    group: str
    number: int


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A group whose rollouts may be started. Submitted again if those that were started are thrown away."""

    group: str
    instance_id: InstanceId
    epoch: int
    numbers: tuple[int, ...]
    """Of the rollouts to start, spares included; their order is the default."""
    num_needed: int
    """Slots that they are to fill."""
    num_chars: int = 0
    """Length of the prompt, in characters."""
    taken: tuple[int, ...] = ()
    """Slots that an earlier process, or an earlier step, has filled."""
    is_open: bool = False
    """Whether it has begun before: its rollouts can be started at once."""


@dataclass(frozen=True, slots=True)
class NextRollout:
    """What to start now. ``engine`` None leaves the engine to the job; ``cap_tokens`` bounds what it may sample."""

    rollout: RolloutKey
    engine: str | None = None
    cap_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """How a rollout ended that was started: its sample is used, it failed, or nobody needed it any more."""

    ending: Literal["finished", "failed", "aborted"]
    tokens: int
    """That its last attempt sampled."""
    seconds: float
    """Since it began."""


class Policy(Protocol):
    """Pure: knows no clock, and does no I/O. Whatever a job starts was chosen by its policy.

    A rollout that was chosen goes on until ``ended``, ``broken`` or ``lost`` is told of it. After the latter two it is
    to be chosen again, unless its group is ``closed`` before.
    """

    @property
    def concurrency(self) -> float:
        """Times the places of the run that it may fill; it is not asked beyond. 1 as a rule."""
        ...

    def room(self) -> int:
        """How many more groups it looks at now; the job submits up to so many, and asks again before each choice."""
        ...

    def submit(self, group: WaitingGroup) -> None:
        """A group may be started. More than ``room`` are submitted where rollouts are begun afresh."""
        ...

    def next(self, loads: EngineLoads) -> NextRollout | None:
        """What to start now; None if nothing that waits should be. Asked again after anything has changed.

        While ``loads.may_begin`` is false, only rollouts of groups that have begun may be chosen. If then also
        ``loads.is_buffer_full``, no other group begins until some that have begun are whole, and were read.
        """
        ...

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:
        """A rollout has ended for good."""
        ...

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:
        """A rollout has sampled as much as its cap allows."""
        ...

    def lost(self, rollout: RolloutKey) -> None:
        """What ran a rollout is gone."""
        ...

    def closed(self, group: str) -> None:
        """Nothing of this group is to be started any more; of its rollouts that were started, no end may be told."""
        ...

    def engine_lost(self, url: str) -> None:
        """An engine does not answer. It is not among ``loads.urls`` until it does."""
        ...

    def begin_step(self, number: int) -> None:
        """The trainer has announced other weights, for the ``number``-th time."""
        ...


@dataclass(frozen=True, slots=True)
class PastRollout:
    """What is known of a rollout that has ended, in this run or in an earlier one of the same input."""

    instance_id: InstanceId
    epoch: int
    number: int
    tokens: int
    seconds: float
    prompt_tokens: int = 0
    is_of_this_run: bool = False


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What a policy is made of."""

    settings: "Scheduler"
    window: int
    """Groups that it looks ahead, and times that it may pass over a group."""
    group_size: int
    max_tokens: int
    """That one call may sample."""
    history: Sequence[PastRollout] = ()


MakePolicy = Callable[[PolicyInputs], Policy]
"""What an entry point in the group ``forebay.policies`` names. Raises ``InvalidInput`` for what it cannot work with."""
