"""Fields of a payload: flags, JSON's own or words, as slime's client sends everything; and what is wrong with one."""

from collections.abc import Mapping
from typing import Any

from forebay.core.errors import InvalidInput

WORDS = {"true": True, "1": True, "false": False, "0": False}


def read_flag(name: str, value: object) -> bool:
    """The flag ``value``; None is false. Raises ``InvalidInput`` that names the field."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    raise InvalidInput(f"{name} must be true or false, got {value!r:.100}", field=name)


def problem_text(problem: Mapping[str, Any]) -> str:
    """What pydantic says is wrong with a field; of our own checks only what they say."""
    return str(problem["msg"]).removeprefix("Value error, ")
