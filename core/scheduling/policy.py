"""The policy that decides which rollout starts next, and on which engine. The job asks it for every free slot.

Policies are found by name: entry points in the group ``forebay.policies``, from Forebay and others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from forebay.core.ids import InstanceId
from forebay.core.lazy_names import find_plugin, load_plugin
from forebay.core.scheduling.engine_loads import EngineLoads

if TYPE_CHECKING:  # pydantic is slow to import
    from forebay.core.scheduling.scheduler import Scheduler

ENTRY_POINT_GROUP = "forebay.policies"


class RolloutKey(NamedTuple):
    """One rollout: the id of its group, and its number in the group."""

    group: str
    number: int


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A group whose rollouts may be started. Submitted again if its started rollouts are discarded."""

    group: str
    instance_id: InstanceId
    epoch: int
    numbers: tuple[int, ...]
    """Numbers of the rollouts to start, spares included, in their default order."""
    num_needed: int
    """Slots that they must fill."""
    num_chars: int = 0
    """Length of the prompt, in characters."""
    taken: tuple[int, ...] = ()
    """Slots already filled by an earlier process or step."""
    is_open: bool = False
    """Whether the group was started before, so that its rollouts can start at once."""


@dataclass(frozen=True, slots=True)
class NextRollout:
    """The rollout to start now. With ``engine`` None, the job chooses; ``cap_tokens`` limits sampled tokens."""

    rollout: RolloutKey
    engine: str | None = None
    cap_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """How a started rollout ended: its sample is used, it failed, or it was no longer needed."""

    ending: Literal["finished", "failed", "aborted"]
    tokens: int
    """Tokens sampled by its last attempt."""
    seconds: float
    """Seconds since it started."""


class Policy(Protocol):
    """A pure decision: no clock, no I/O. A job starts only rollouts that its policy has chosen.

    A chosen rollout runs until ``ended``, ``broken`` or ``lost`` is called for it. After the latter two it must
    be chosen again, unless its group is ``closed`` first.
    """

    @property
    def concurrency(self) -> float:
        """Factor on the run's slots up to which the policy is asked for rollouts. Usually 1."""
        ...

    def room(self) -> int:
        """Number of further groups it accepts now; the job submits up to that many, and asks before each choice."""
        ...

    def submit(self, group: WaitingGroup) -> None:
        """Accept a group that may be started. More than ``room`` are submitted if rollouts are restarted."""
        ...

    def next(self, loads: EngineLoads) -> NextRollout | None:
        """Choose what to start now; None to start nothing. Called again after anything has changed.

        While ``loads.may_begin`` is false, only rollouts of started groups may be chosen. If ``loads.is_buffer_full``
        is also true, no other group starts until some started ones are complete and were read.
        """
        ...

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:
        """Note that a rollout has ended for good."""
        ...

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:
        """Note that a rollout has reached its token cap."""
        ...

    def lost(self, rollout: RolloutKey) -> None:
        """Note that the process running a rollout is gone."""
        ...

    def closed(self, group: str) -> None:
        """Start nothing more of this group. Its running rollouts may end without a call of ``ended``."""
        ...

    def engine_lost(self, url: str) -> None:
        """Note that an engine does not respond. It is not in ``loads.urls`` until it does."""
        ...

    def begin_step(self, number: int) -> None:
        """Note that the trainer has announced new weights, for the ``number``-th time."""
        ...


@dataclass(frozen=True, slots=True)
class PastRollout:
    """A rollout that has ended, in this run or in an earlier run with the same input."""

    instance_id: InstanceId
    epoch: int
    number: int
    tokens: int
    seconds: float
    prompt_tokens: int = 0
    is_of_this_run: bool = False


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The arguments for making a policy."""

    settings: "Scheduler"
    window: int
    """Number of groups to look ahead, and maximum number of times a group may be passed over."""
    group_size: int
    max_tokens: int
    """Maximum tokens per call."""
    history: Sequence[PastRollout] = ()


MakePolicy = Callable[[PolicyInputs], Policy]
"""Type of an entry point in the group ``forebay.policies``. Raises ``InvalidInput`` for unusable inputs."""


def check_policy(name: str) -> None:
    """Raise ``InvalidInput`` if no policy of this name is installed."""
    find_plugin(ENTRY_POINT_GROUP, name, what="policy", field="scheduler.policy")


def make_policy(inputs: PolicyInputs) -> Policy:
    """Make the policy that the settings name. Raises ``InvalidInput``, also if it cannot be loaded."""
    make: MakePolicy = load_plugin(ENTRY_POINT_GROUP, inputs.settings.policy, what="policy", field="scheduler.policy")
    return make(inputs)
