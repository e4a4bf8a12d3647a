"""A step of a run: what lies between two weight versions that its trainer announces."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepStart:
    """Where a run was when another weight version was announced."""

    number: int = 0
    """How often one was."""
    num_closed: int = 0
    """Groups that had left the open state."""
    full: list[str] = field(default_factory=list)
    """Ids of the open groups whose slots were all filled: they belong to the step before."""
    weight_version: int | None = None
    """That version; None before the first. A rewind leaves it: the engines have it until another is announced."""
