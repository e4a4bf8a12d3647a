"""How many workers a run asks for, and where: the fields ``workers`` and ``backend`` of its start."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from forebay.core.errors import InvalidInput
from forebay.core.fields import problem_text

BackendName = Literal["inline", "processes", "ray"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
DEFAULT_BACKEND: BackendName = "processes"

HINTS: Mapping[str, str] = {
    "workers": "a count, as 4, or a list with the count of each node, as [2, 4]",
    "backend": f"one of {', '.join(BACKENDS)}",
}


def _read_counts(value: Any) -> Any:
    """Numbers may be strings, as a command line or slime's client sends them. A single count is that of one node."""
    counts = value if isinstance(value, list | tuple) else [value]
    read = [_read_count(each) for each in counts]
    if not read:
        raise ValueError("names no node")
    return read


def _read_count(value: object) -> int:
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    try:
        count = int(value) if is_number else 0  # type: ignore[call-overload]
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError("must be at least 1 for each node, and whole")
    return int(count)


WorkerCounts = Annotated[list[int], BeforeValidator(_read_counts)]
"""By node."""


def wrong_workers(problem: Mapping[str, Any]) -> InvalidInput:
    """What is wrong with either of the fields, as pydantic says it."""
    field = str(problem["loc"][0])
    given = repr(problem.get("input"))[:100]
    return InvalidInput(f"{field}: {problem_text(problem)}, got {given}", hint=HINTS[field], field=field)
