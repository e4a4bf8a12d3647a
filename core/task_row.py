"""Reads a task from a line of JSON, and reports what is wrong with an invalid one."""

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.errors import InputRefused
from forebay.core.ids import MAX_ID_LENGTH, InstanceId, read_instance_id
from forebay.core.starts.payload_text import is_plain

Message = dict[str, Any]


@dataclass(frozen=True)
class TaskRow:
    """One instance: ``number`` is the 0-based line, ``fields`` is everything in the line."""

    number: int
    instance_id: InstanceId
    prompt: list[Message]
    fields: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """16 hex digits that depend on the line's contents, not on its formatting. Samples include it."""
        try:
            canonical = msgspec.json.encode(self.fields, order="deterministic")
        except OverflowError:  # an integer of more than 64 bits
            canonical = json.dumps(self.fields, sort_keys=True).encode()
        return blake2b(canonical, digest_size=8).hexdigest()


@dataclass(frozen=True)
class RowProblem:
    """What is wrong with an input file; ``line`` is 1-based, 0 for the file as a whole."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return f"{where}: {self.message}"

    def as_error(self) -> InputRefused:
        """The problem as an error that ends a start or a run."""
        return InputRefused(
            str(self),
            hint='each line is a JSON object with "prompt": a string or a list of messages',
            field="input_file",
        )


class BadRow(ValueError):
    """A line is not a valid row; the text says why."""


def parse_row(line: bytes, number: int) -> TaskRow:
    """Read one line. Raises ``BadRow``."""
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRow(f"must be a JSON object (got {_kind(fields)})")
    return TaskRow(number, _instance_id(fields.get("instance_id"), number), _prompt(fields), fields)


def _instance_id(value: object, number: int) -> InstanceId:
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise BadRow(f"instance_id must be a string or a number (got {value!r:.100})")
    if isinstance(value, str) and not is_plain(value):
        raise BadRow("instance_id contains a NUL byte or half a surrogate pair")
    if isinstance(value, str) and len(value) > MAX_ID_LENGTH:
        raise BadRow(f"instance_id must have at most {MAX_ID_LENGTH} characters (got {len(value)})")
    return read_instance_id(value)


def _prompt(fields: dict[str, Any]) -> list[Message]:
    if "prompt" not in fields:
        raise BadRow('has no "prompt"')
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(f'"prompt" must be a string or a list of messages (got {_kind(prompt)})')
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f'each message of "prompt" must be an object with a "role" (got {message!r:.100})')
    return prompt


def _kind(value: object) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return "an empty list" if value == [] else names.get(type(value), "a number")
