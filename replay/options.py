"""What to replay, and how: the field ``replay`` of a start."""

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from forebay.core.errors import InvalidInput
from forebay.core.fields import problem_text

Mode = Literal["only", "cache", "repeat"]
Rewards = Literal["recorded", "again"]
Code = Literal["recorded", "today"]

SUFFIX = ".fbr"
"""The suffix of a recording's file name."""

_range = re.compile(r"\s*(\d{1,15})\s*(?:-\s*(\d{1,15})\s*)?").fullmatch


def _read_steps(value: Any) -> tuple[tuple[int, int], ...]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(_read_range(part) for part in parts)


def _read_range(part: Any) -> tuple[int, int]:
    if isinstance(part, list | tuple) and len(part) == 2 and all(type(each) is int for each in part):
        first, last = part
    elif isinstance(part, str | int) and not isinstance(part, bool) and (found := _range(str(part))):
        first, last = int(found[1]), int(found[2] or found[1])
    else:
        raise ValueError(f"{part!r} is neither a step nor a range of steps, such as '50-60,70' or [50, 51]")
    if first > last:
        raise ValueError(f"a range of steps must go from the smaller to the larger (got {first}-{last})")
    return first, last


Steps = Annotated[tuple[tuple[int, int], ...], BeforeValidator(_read_steps), Field(min_length=1)]
"""Ranges of steps, inclusive."""
_steps = TypeAdapter(Steps)


def parse_steps(given: Any, field: str = "steps") -> tuple[tuple[int, int], ...]:
    """Parse steps given by a user: ``"50-60,70"``, ``[50, 51]``. Raises ``InvalidInput``."""
    try:
        return _steps.validate_python(given)
    except ValidationError as error:
        raise InvalidInput(f"{field}: {problem_text(error.errors(include_url=False)[0])}"[:500], field=field) from None


class ReplayOptions(BaseModel):
    """A source alone (a string), or an object with these fields."""

    # Otherwise a misspelt field would be ignored silently.
    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(min_length=1, max_length=4_096)
    """A run (id or name), or the path of an exported file (`*.fbr`)."""
    mode: Mode = "only"
    """`only`: replay the recording, without process or engine. `cache`: also generate what is missing or failed.
    `repeat`: as `cache`, but another recorded epoch of the same instance replaces a missing group, if there is one."""
    rewards: Rewards = "recorded"
    """`again`: replay the recorded rollouts, but call the reward function again."""
    steps: Steps | None = None
    """Only the groups in the batches of these trainer steps: `50-60,70`."""
    code: Code | None = None
    """Which hooks and rewards to use: the `recorded` copy (the default), or the `today` version of the generator (the
    default with `again`, and always used for a file)."""
    ignore: tuple[str, ...] = ()
    """Fields in which the start may differ from the recording."""

    @classmethod
    def parse(cls, given: Any) -> Self | None:
        """The field ``replay`` of a payload, or None. Raises ``InvalidInput``."""
        if given is None:
            return None
        try:
            return cls.model_validate({"source": given} if isinstance(given, str) else given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, ("replay", *first["loc"][:1])))
            hint = "a run or a file, or an object: source, mode, rewards, steps, code, ignore"
            raise InvalidInput(f"{name}: {problem_text(first)}"[:500], field=name, hint=hint) from None

    @property
    def is_file(self) -> bool:
        """Whether the source is a file: its name ends in ``.fbr``, or it is a path."""
        return is_file_name(self.source)

    @property
    def uses_code_of_today(self) -> bool:
        """Whether the generator's current code is used, not the recorded copy."""
        return self.is_file or (self.code or ("today" if self.rewards == "again" else "recorded")) == "today"

    @property
    def needs_process(self) -> bool:
        """Whether a run process is needed; otherwise the server feeds the recording itself."""
        return self.mode != "only" or self.rewards == "again"


def is_file_name(source: str) -> bool:
    """Whether a source given by a user is a file, not a run."""
    return source.endswith(SUFFIX) or len(PurePath(source).parts) > 1


def is_chosen(step: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether a step is in one of these ranges."""
    return any(first <= step <= last for first, last in steps)
