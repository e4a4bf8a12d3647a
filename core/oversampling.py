"""Starting more rollouts than a trainer needs, so that it does not wait for the slowest of them."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forebay.core.errors import InvalidInput


class Oversampling(BaseModel):
    """How many more are started, and what becomes of those that a step does not need."""

    # A misspelt field would otherwise do nothing, and nobody would notice.
    model_config = ConfigDict(frozen=True, extra="forbid")

    rollouts_per_group: int | None = Field(default=None, ge=1, le=65_536)
    """Rollouts that are started for each group; those that end first fill it, the others are thrown away."""
    groups_per_step: int | None = Field(default=None, ge=1, le=1_000_000)
    """Complete groups after which the run is held until the trainer announces its next weight version."""
    leftover: Literal["keep", "discard"] = "keep"
    """What becomes of the rollouts in flight then: they go on later from their tokens, or begin afresh."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.rollouts_per_group is None and self.groups_per_step is None:
            raise ValueError("give rollouts_per_group, groups_per_step, or both")
        return self

    def num_spares(self, group_size: int) -> int:
        """Rollouts of a group beyond its slots."""
        return max(0, (self.rollouts_per_group or 0) - group_size)

    def checked(self, group_size: int) -> Self:
        """The same, if it can fill groups of that size. Raises ``InvalidInput``."""
        if self.rollouts_per_group is not None and self.rollouts_per_group < group_size:
            raise InvalidInput(
                f"rollouts_per_group must be at least the group size, {group_size}, got {self.rollouts_per_group}",
                field="oversampling.rollouts_per_group",
            )
        return self


def parse_oversampling(given: Mapping[str, Any]) -> Oversampling:
    """Read it out of JSON values; numbers may be strings. Raises ``InvalidInput`` with the first wrong field."""
    try:
        return Oversampling.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(["oversampling", *map(str, first["loc"])])
        raise InvalidInput(f"{name}: {first['msg']}, got {first.get('input')!r}"[:500], field=name) from None
