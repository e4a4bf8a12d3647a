"""What whoever starts a run is warned of: fields that nothing reads, and an engine that will be missed."""

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any

from forebay.core.addresses import engine_urls
from forebay.core.run import RunSettings
from forebay.generators.base import PAYLOAD_NAMES
from forebay.generators.discovery.info import GeneratorInfo
from forebay.replay.options import ReplayOptions

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


def start_warnings(payload: dict[str, Any], generator: GeneratorInfo) -> list[str]:
    """What whoever sent ``payload`` should look at. The start goes on, and the generator gets every field."""
    return [*_unread_fields(payload, generator), *_missing_engine(payload, generator)]


def _unread_fields(payload: dict[str, Any], generator: GeneratorInfo) -> Iterator[str]:
    """Of the fields that nobody seems to know, those that are nearly the name of another.

    One that is like no other is the generator's own affair: it may read it in a way that its text does not show.
    """
    known = KNOWN | generator.payload_fields.read
    meant = {**{name: name for name in known}, **{name: f"sampling_params.{name}" for name in SAMPLING}}
    unknown = (name for name in payload if name not in known and name not in generator.payload_fields.words)
    for name in islice((name for name in unknown if len(name) <= MAX_NAME_LENGTH), MAX_UNKNOWN):
        nearest = get_close_matches(name, meant, n=1, cutoff=MIN_SIMILARITY)
        if nearest:
            yield f"nothing reads the field {name!r}: did you mean {meant[nearest[0]]!r}?"


def _missing_engine(payload: dict[str, Any], generator: GeneratorInfo) -> Iterator[str]:
    words = generator.payload_fields.words
    replay = ReplayOptions.parse(payload.get("replay"))
    if replay is not None and replay.mode == "only":
        return  # nothing is generated
    # A file that has the word may name an engine of its own.
    expects_one = generator.imports_base and "from_payload" in words and "remote_engine_url" not in words
    if expects_one and not engine_urls(payload):
        yield (
            f"no engine is given, and BaseGenerator.from_payload in {generator.path.name} needs one: "
            "--engine-url URL, or remote_engine_url in the body"
        )
