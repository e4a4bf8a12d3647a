"""Warnings about a start: fields that look like a misspelt field of Forebay's."""

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any

from forebay.core.run import RunSettings
from forebay.generators.base import PAYLOAD_NAMES

OTHER_FIELDS = {"task_type", "input_file", "num_epoch", "name", "run_id", "start_id", "skip_instance_ids", "replay"}
ADDRESSES = {"remote_engine_url", "remote_buffer_url"}
OF_SLIMES_CLIENT = {"tokenizer_path"}
"""It sends them, and nobody here reads them."""

KNOWN = frozenset(
    {*RunSettings.model_fields, *(field.alias for field in RunSettings.model_fields.values() if field.alias)}
    | PAYLOAD_NAMES.keys()
    | OTHER_FIELDS
    | ADDRESSES
    | OF_SLIMES_CLIENT
)
"""The fields of a start that Forebay, its base generator or slime's client have."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters that are often put beside ``sampling_params`` instead of into it."""

MIN_SIMILARITY = 0.75
MAX_UNKNOWN = 50
MAX_NAME_LENGTH = 64


_MEANT = {**{name: name for name in KNOWN}, **{name: f"sampling_params.{name}" for name in SAMPLING}}


def start_warnings(payload: dict[str, Any]) -> list[str]:
    """A warning for each unknown field whose name is close to a known one.

    The start is accepted, and the generator gets every field. A field that resembles no other is the generator's own.
    """
    return list(_misspelt_fields(payload))


def _misspelt_fields(payload: dict[str, Any]) -> Iterator[str]:
    unknown = (name for name in payload if name not in KNOWN and len(name) <= MAX_NAME_LENGTH)
    for name in islice(unknown, MAX_UNKNOWN):
        nearest = get_close_matches(name, _MEANT, n=1, cutoff=MIN_SIMILARITY)
        if nearest:
            yield f"Forebay has no field {name!r}: did you mean {_MEANT[nearest[0]]!r}?"
