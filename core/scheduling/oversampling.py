"""Starts more rollouts than a trainer needs, so that it does not wait for the slowest."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forebay.core.errors import InvalidInput
from forebay.core.fields import wrong_field


class Oversampling(BaseModel):
    """How many extra rollouts start, and what happens to those that a step does not need."""

    # A misspelt field would otherwise be ignored silently.
    model_config = ConfigDict(frozen=True, extra="forbid")

    rollouts_per_group: int | None = Field(default=None, ge=1, le=65_536)
    """Rollouts started for each group; the first to end fill it, the others are discarded."""
    groups_per_step: int | None = Field(default=None, ge=1, le=1_000_000)
    """Number of complete groups after which the run waits for the trainer's next weight version."""
    groups_begun: int | None = Field(default=None, ge=1, le=1_000_000)
    """With ``defer``: number of groups that a step starts; the first ``groups_per_step`` to complete count."""
    leftover: Literal["keep", "discard", "defer"] = "keep"
    """Rollouts then in flight: `keep` resumes them later from their tokens, `discard` restarts them. `defer` restarts
    their whole groups, in a long step of such groups once ``groups_per_step`` of them wait."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.leftover == "defer" and self.groups_per_step is None:
            raise ValueError("leftover 'defer' needs groups_per_step: it defers groups to another step")
        if self.rollouts_per_group is None and self.groups_per_step is None:
            raise ValueError("give rollouts_per_group, groups_per_step, or both")
        if self.groups_begun is not None and self.leftover != "defer":
            raise ValueError("groups_begun needs leftover 'defer', which defers the remaining groups")
        if self.groups_begun is not None and self.groups_begun < (self.groups_per_step or 0):
            raise ValueError("groups_begun must be at least groups_per_step")
        return self

    @property
    def begun_per_step(self) -> int | None:
        """Number of groups that a step starts; None for as many as there are free slots."""
        return (self.groups_begun or self.groups_per_step) if self.leftover == "defer" else None

    def num_spares(self, group_size: int) -> int:
        """Number of a group's rollouts beyond its slots."""
        return max(0, (self.rollouts_per_group or 0) - group_size)

    def checked(self, group_size: int) -> Self:
        """Return the settings if they can fill groups of that size. Raises ``InvalidInput``."""
        if self.rollouts_per_group is not None and self.rollouts_per_group < group_size:
            raise InvalidInput(
                f"rollouts_per_group must be at least the group size, {group_size} (got {self.rollouts_per_group})",
                hint=HINTS["rollouts_per_group"],
                field="oversampling.rollouts_per_group",
            )
        return self


HINTS: Mapping[str, str] = {
    "rollouts_per_group": "10 starts two spares for groups of 8",
    "groups_per_step": "with 64, the run waits after 64 complete groups until the next weight version",
    "groups_begun": "80 starts a quarter more than the 64 groups of a step, with leftover defer",
    "leftover": "keep resumes the others, discard restarts them, defer defers their groups",
}
FIELD_HINTS = {
    "oversampling": (
        'it looks like {"groups_per_step": 64, "groups_begun": 80, "leftover": "defer"}, or {"rollouts_per_group": 10}'
    ),
    **{f"oversampling.{name}": hint for name, hint in HINTS.items()},
}


def parse_oversampling(given: Mapping[str, Any]) -> Oversampling:
    """Read the settings from JSON values; numbers may be strings. Raises ``InvalidInput`` for an invalid field."""
    try:
        return Oversampling.model_validate(given)
    except ValidationError as error:
        raise wrong_field(error.errors(include_url=False)[0], FIELD_HINTS, outer=("oversampling",)) from None
