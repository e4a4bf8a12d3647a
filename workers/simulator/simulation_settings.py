"""Names and values of ``--set NAME=JSON`` of a simulation."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.oversampling import HINTS as OVERSAMPLING
from forebay.core.scheduling.scheduler import HINTS as SCHEDULER
from forebay.workers.simulator.cost import EngineCost


@dataclass(frozen=True)
class _Number:
    """Limits of a numeric setting. ``takes_null``: null is accepted."""

    least: float
    most: float = math.inf
    is_whole: bool = True
    takes_null: bool = False


OF_SCENARIO: Mapping[str, _Number] = {
    "group_size": _Number(1),
    "groups_per_read": _Number(1, takes_null=True),
    "max_tokens": _Number(1),
    "num_epochs": _Number(1),
    "num_steps": _Number(1, takes_null=True),
    "train_s": _Number(0, is_whole=False),
}
OF_ENGINES: Mapping[str, _Number] = {field.name: _Number(0, is_whole=False) for field in fields(EngineCost)} | {
    "cached_share": _Number(0, 1, is_whole=False),
    "kv_reserve": _Number(0, 1, is_whole=False),
    "kv_tokens": _Number(2, takes_null=True),
    "places": _Number(1),
    "shared_share": _Number(0, 1, is_whole=False),
}
OBJECTS: Mapping[str, Mapping[str, str]] = {"oversampling": OVERSAMPLING, "scheduler": SCHEDULER}
EXAMPLES: Mapping[str, str] = {
    "history": "true",
    "group_size": "8",
    "groups_per_read": "64",
    "max_tokens": "2048",
    "num_epochs": "2",
    "num_steps": "50",
    "train_s": "30",
    "cached_share": "0.9",
    "kv_reserve": "0.1",
    "kv_tokens": "200000",
    "places": "32",
    "prefill_tokens_per_s": "20000",
    "shared_share": "0.9",
    "speed": "[1, 2]",
    "step_s": "0.01",
    "step_s_per_sequence": "0.0001",
    "tool_s": "0.5",
}
KNOWN = sorted({*OBJECTS, "history", *OF_SCENARIO, *OF_ENGINES})


def read_settings(given: Sequence[str]) -> dict[str, list[Any]]:
    """Parse ``NAME=JSON`` arguments into lists of values by name. Raises ``InvalidInput``."""
    found: dict[str, list[Any]] = {}
    for each in given:
        name, is_set, text = each.partition("=")
        if not is_set or not _is_known(name):
            hint = f"the names are {', '.join(KNOWN)}; write a field of an object as in scheduler.top"
            raise InvalidInput(f"--set takes NAME=JSON (got {each!r:.200})", hint=hint, field=name if is_set else "set")
        found.setdefault(name, []).append(_checked(name, _parsed(name, text)))
    for name in found:
        outer, is_inside, _ = name.partition(".")
        if is_inside and outer in found:
            raise InvalidInput(f"--set gives both {outer} and {name}", hint=f"put the field into {outer}", field=name)
    return found


def merged(name: str, settings: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The object ``before``, updated with the settings of its single fields."""
    inside = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{name}.")}
    return {**before, **inside}


def _is_known(name: str) -> bool:
    outer, is_inside, inner = name.partition(".")
    return inner in OBJECTS.get(outer, ()) if is_inside else name in KNOWN


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "as in --set oversampling='{\"groups_per_step\": 64}'"
        if "." in name and text.replace("-", "").isalpha():
            return text  # as in scheduler.cap=own
        raise InvalidInput(f"--set {name}: {error} (got {text!r:.200})", hint=hint, field=name) from None


def _checked(name: str, value: Any) -> Any:
    if name in OBJECTS:
        return _object(name, value)
    if name == "history" and not isinstance(value, bool):
        raise InvalidInput(f"history must be true or false (got {value!r:.100})", hint=_hint(name), field=name)
    if name in OF_SCENARIO:
        _check_number(name, value, OF_SCENARIO[name])
    if name in OF_ENGINES:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise InvalidInput(f"{name} is an empty list", hint="use a number, or one for each engine", field=name)
        for one in values:
            _check_number(name, one, OF_ENGINES[name])
    return value


def _object(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise InvalidInput(f"{name} must be an object or null (got {value!r:.100})", hint=_hint(name), field=name)
    if value is not None and name == "scheduler" and "policy" in value:
        message = "set the policy by --policy, not by --set scheduler"
        raise InvalidInput(message, hint=f"use --policy {value['policy']}"[:100], field=name)
    return value


def _check_number(name: str, value: Any, wanted: _Number) -> None:
    if value is None and wanted.takes_null:
        return
    kind = "a whole number" if wanted.is_whole else "a number"
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (wanted.is_whole and not isinstance(value, int)):
        raise InvalidInput(f"{name} must be {kind} (got {value!r:.100})", hint=_hint(name), field=name)
    if not wanted.least <= value <= wanted.most:
        most = f" and at most {wanted.most:g}" if math.isfinite(wanted.most) else ""
        message = f"{name} must be at least {wanted.least:g}{most} (got {value!r:.100})"
        raise InvalidInput(message, hint=_hint(name), field=name)


def _hint(name: str) -> str:
    if name in OBJECTS:
        return (
            f"an object with any of {', '.join(OBJECTS[name])}; or one field, as in {name}.{next(iter(OBJECTS[name]))}"
        )
    return f"for example --set {name}={EXAMPLES[name]}"
