"""What is known of a simulated run: of each attempt of a rollout, each step, each engine; and what befalls it."""

from dataclasses import dataclass
from typing import Literal

from forebay.core.ids import InstanceId

Ending = Literal["finished", "failed", "aborted", "broken", "retried"]


def engine_url(number: int) -> str:
    """The address of the ``number``-th engine of a scenario."""
    return f"http://engine-{number}"


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """An engine does not answer from ``at_s`` on, and does again from ``back_s`` on. What it sampled is lost."""

    engine: int
    at_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class GroupClosing:
    """The buffer closes a group at that time, if it has been begun by then, and is not complete."""

    instance_id: InstanceId
    epoch: int
    at_s: float


@dataclass(slots=True)
class SimulatedRollout:
    """One attempt of a rollout. Times in seconds of the run; ``tokens`` are those of all its turns."""

    instance: InstanceId
    epoch: int
    number: int
    slot: int
    attempt: int
    step: int
    engine: str
    ending: Ending
    submitted_s: float
    started_s: float
    ended_s: float
    prompt: int
    cached: int
    sampled: int
    """Those that went with an engine are not among them."""
    reward: float | None = None
    lost: int = 0
    """Sampled by engines that were gone before they answered."""
    preemptions: int = 0
    cap: int | None = None
    """What it might sample."""
    chosen: int = 0
    """How many attempts had been begun when it was, itself included."""
    trained_step: int | None = None
    """The step that has trained on its sample."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What the trainer did once."""

    number: int
    begun_s: float
    """When it announced the weights before, or began."""
    ready_s: float
    """When it had its groups."""
    ended_s: float
    """When it announced other weights."""
    groups: tuple[tuple[InstanceId, int], ...]


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What an engine did."""

    busy_s: float
    """In which it sampled, or read prompts."""
    sampled: float
    preemptions: int
