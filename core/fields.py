"""Fields of a payload: flags, which slime's client sends as text, and errors about invalid fields."""

from collections.abc import Mapping
from typing import Any

from forebay.core.errors import InvalidInput

WORDS = {"true": True, "1": True, "false": False, "0": False}


def read_flag(name: str, value: object) -> bool:
    """Read a flag; None is false. Raises ``InvalidInput`` that names the field."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    raise InvalidInput(f"{name} must be true or false (got {value!r:.100})", field=name)


def problem_text(problem: Mapping[str, Any]) -> str:
    """pydantic's message about a field, without the prefix that it adds to Forebay's own checks."""
    return str(problem["msg"]).removeprefix("Value error, ")


def wrong_field(
    problem: Mapping[str, Any], hints: Mapping[str, str] | None = None, *, outer: tuple[str, ...] = ()
) -> InvalidInput:
    """Convert pydantic's error about a field, below ``outer``, to an ``InvalidInput`` with a hint.

    ``hints`` are by field name, such as ``scheduler`` or ``scheduler.window``.
    """
    parts = [*outer, *map(str, problem["loc"])]
    name, hints = ".".join(parts) or "payload", hints or {}
    text = "must be an object" if problem["type"] == "model_type" else problem_text(problem)
    hint = hints.get(".".join(parts[:2])) or hints.get(parts[0] if parts else "", "")
    return InvalidInput(f"{name}: {text}, got {problem.get('input')!r}"[:500], hint=hint, field=name)
