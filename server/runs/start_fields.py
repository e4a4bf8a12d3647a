"""The fields of a start: their names, which unknown ones look misspelt, and defaults by task type.

Defaults come from ``[run_defaults.math]`` and similar tables in the configuration.
"""

import difflib
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pydantic import ValidationError

from forebay.core.addresses import engine_urls, is_http_url
from forebay.core.errors import InvalidInput
from forebay.core.fields import wrong_field
from forebay.core.run import RunSettings
from forebay.core.starts.evaluate import GROUP_SIZES
from forebay.core.starts.run_start import OF_ONE_START
from forebay.generators.base import PAYLOAD_NAMES, BaseGenerator

OTHER_FIELDS = {"task_type", "input_file", "num_epoch", "name", "run_id", "start_id", "skip_instance_ids", "replay"}
OF_EVALUATIONS = {"evaluation"}
"""Set by the server and by slime's evaluations."""
ADDRESSES = {"remote_engine_url", "remote_buffer_url"}
OF_SLIMES_CLIENT = {"tokenizer_path"}
"""Fields that slime's client sends and Forebay does not read."""

KNOWN = frozenset(
    {*RunSettings.model_fields, *(field.alias for field in RunSettings.model_fields.values() if field.alias)}
    | PAYLOAD_NAMES.keys()
    | OTHER_FIELDS
    | OF_EVALUATIONS
    | ADDRESSES
    | OF_SLIMES_CLIENT
)
"""All fields of a start that Forebay, its base generator or slime's client define."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters that are often put next to ``sampling_params`` instead of into it."""

MIN_SIMILARITY = 0.75
MAX_UNKNOWN = 50
MAX_NAME_LENGTH = 64


_MEANT = {**{name: name for name in KNOWN}, **{name: f"sampling_params.{name}" for name in SAMPLING}}

Table = Mapping[str, Any]
WITHOUT_DEFAULTS = OF_ONE_START | OF_EVALUATIONS | {"task_type"}
"""Fields that `run_defaults` cannot set."""
SETTINGS = {name: field.alias or name for name, field in RunSettings.model_fields.items()}
HAVE_DEFAULTS = sorted(KNOWN - WITHOUT_DEFAULTS)


def start_warnings(payload: dict[str, Any]) -> list[str]:
    """Warnings for unknown fields whose names are close to a known one.

    The start is accepted, and the generator gets every field. A field that resembles no other is the generator's own.
    """
    warnings = []
    unknown = (name for name in payload if name not in KNOWN and len(name) <= MAX_NAME_LENGTH)
    for name in islice(unknown, MAX_UNKNOWN):
        nearest = difflib.get_close_matches(name, _MEANT, n=1, cutoff=MIN_SIMILARITY)
        if nearest:
            warnings.append(f"Forebay has no field {name!r}: did you mean {_MEANT[nearest[0]]!r}?")
    return warnings


class RunDefaults:
    """Default fields of each task type."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self.tables = tables

    def missing_in(self, payload: Table) -> dict[str, Any]:
        """Defaults of the task type for fields that the payload omits. An explicit null is not an omission."""
        task_type = payload.get("task_type")
        table = self.tables.get(task_type, {}) if isinstance(task_type, str) else {}
        named = {*payload, *(GROUP_SIZES if GROUP_SIZES & set(payload) else ())}
        return {name: value for name, value in table.items() if name not in named}


def check_run_defaults(tables: Mapping[str, Table], source: str) -> None:
    """Raise ``InvalidInput`` for the first wrong field, naming the table and its ``source``."""
    for task_type, table in tables.items():
        for name in table:
            if name not in HAVE_DEFAULTS:
                raise _wrong(source, task_type, name, _unknown(name))
        try:
            _check_values(table)
        except InvalidInput as error:
            raise _wrong(source, task_type, error.field or "", error.message) from None


def _wrong(source: str, task_type: str, name: str, what: str) -> InvalidInput:
    return InvalidInput(
        f"{source}: [run_defaults.{task_type}] {what}",
        hint="docs/settings.md lists the settings of a run",
        field=f"run_defaults.{task_type}.{name}",
    )


def _unknown(name: str) -> str:
    if name in WITHOUT_DEFAULTS:
        return f"{name} belongs to a single start and cannot have a default"
    nearest = difflib.get_close_matches(name, HAVE_DEFAULTS, 1)
    return f"{name} is not a setting of a run" + (f": did you mean {nearest[0]}?" if nearest else "")


def _check_values(table: Table) -> None:
    given = {SETTINGS.get(name, name): value for name, value in table.items()}
    size = SETTINGS["group_size"]
    try:
        # Uses the largest group, since the start decides its size; only shares of it are checked here.
        RunSettings.model_validate({size: 65_536, **given})
    except ValidationError as error:
        raise wrong_field(error.errors(include_url=False)[0]) from None
    if "num_epoch" in given:
        _check_argument("num_repeats", given.pop("num_epoch"), "num_epoch")
    for url in engine_urls(given):
        if not is_http_url(url):
            raise InvalidInput(f"remote_engine_url must be an HTTP address (got {url!r})", field="remote_engine_url")
    for name, argument in PAYLOAD_NAMES.items():
        if name in given and name != "oversampling":  # which depends on the start's group size
            _check_argument(argument, given[name], name)
    for name in ("input_file", "template_path"):
        if not isinstance(given.get(name, "path"), str):
            raise InvalidInput(f"{name} must be a path (got {given[name]!r:.100})", field=name)


def _check_argument(argument: str, value: object, name: str) -> None:
    """Check ``value`` with the base generator, as a run will."""
    try:
        BaseGenerator("http://engine.invalid", "http://buffer.invalid", **{argument: value})  # type: ignore[arg-type]
    except (InvalidInput, TypeError, ValueError) as error:
        text = error.message if isinstance(error, InvalidInput) else str(error)
        # The message begins with the argument's name, which may differ from the field's.
        raise InvalidInput(f"{name}: {text.removeprefix(argument).strip()} (got {value!r:.100})", field=name) from None
