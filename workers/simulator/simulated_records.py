"""What is known of a simulated run, of each step and each engine; and what befalls it."""

from dataclasses import dataclass

from forebay.core.ids import InstanceId


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
