"""Starting more rollouts than a trainer needs, so that it does not wait for the slowest of them."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forebay.core.errors import InvalidInput
from forebay.core.fields import wrong_field


class Oversampling(BaseModel):
    """How many more are started, and what becomes of those that a step does not need."""

    # A misspelt field would otherwise do nothing, and nobody would notice.
    model_config = ConfigDict(frozen=True, extra="forbid")

    rollouts_per_group: int | None = Field(default=None, ge=1, le=65_536)
    """Rollouts that are started for each group; those that end first fill it, the others are thrown away."""
    groups_per_step: int | None = Field(default=None, ge=1, le=1_000_000)
    """Complete groups after which the run is held until the trainer announces its next weight version."""
    groups_begun: int | None = Field(default=None, ge=1, le=1_000_000)
    """With ``defer``: groups that a step begins, of which the first ``groups_per_step`` to be complete count."""
    leftover: Literal["keep", "discard", "defer"] = "keep"
    """What becomes of the rollouts in flight then: they go on later from their tokens, or begin afresh, or their whole
    group does, in a long step of such groups once ``groups_per_step`` of them wait."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.leftover == "defer" and self.groups_per_step is None:
            raise ValueError("leftover 'defer' needs groups_per_step: it puts groups off to another step")
        if self.rollouts_per_group is None and self.groups_per_step is None:
            raise ValueError("give rollouts_per_group, groups_per_step, or both")
        if self.groups_begun is not None and self.leftover != "defer":
            raise ValueError("groups_begun needs leftover 'defer', which decides what becomes of the other groups")
        if self.groups_begun is not None and self.groups_begun < (self.groups_per_step or 0):
            raise ValueError("groups_begun must be at least groups_per_step")
        return self

    @property
    def begun_per_step(self) -> int | None:
        """Groups that a step begins; None where it begins as many as there are places for."""
        return (self.groups_begun or self.groups_per_step) if self.leftover == "defer" else None

    def num_spares(self, group_size: int) -> int:
        """Rollouts of a group beyond its slots."""
        return max(0, (self.rollouts_per_group or 0) - group_size)

    def checked(self, group_size: int) -> Self:
        """The same, if it can fill groups of that size. Raises ``InvalidInput``."""
        if self.rollouts_per_group is not None and self.rollouts_per_group < group_size:
            raise InvalidInput(
                f"rollouts_per_group must be at least the group size, {group_size}, got {self.rollouts_per_group}",
                hint=HINTS["rollouts_per_group"],
                field="oversampling.rollouts_per_group",
            )
        return self


HINTS: Mapping[str, str] = {
    "rollouts_per_group": "10 starts two spares for groups of 8",
    "groups_per_step": "64 holds the run after so many complete groups, until the next weight version",
    "groups_begun": "80 begins a quarter more than the 64 groups of a step, with leftover defer",
    "leftover": "keep lets the others go on, discard begins them afresh, defer puts their groups off",
}
FIELD_HINTS = {
    "oversampling": (
        'it looks like {"groups_per_step": 64, "groups_begun": 80, "leftover": "defer"}, or {"rollouts_per_group": 10}'
    ),
    **{f"oversampling.{name}": hint for name, hint in HINTS.items()},
}


def parse_oversampling(given: Mapping[str, Any]) -> Oversampling:
    """Read it out of JSON values; numbers may be strings. Raises ``InvalidInput`` with the first wrong field."""
    try:
        return Oversampling.model_validate(given)
    except ValidationError as error:
        raise wrong_field(error.errors(include_url=False)[0], FIELD_HINTS, outer=("oversampling",)) from None
