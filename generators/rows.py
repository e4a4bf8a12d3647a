"""Reading task rows from a JSONL file: streamed, checked, numbered, and shuffled without holding the file."""

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from forebay.core.errors import InputRefused
from forebay.core.ids import InstanceId

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One instance: ``number`` is the 0-based line, ``fields`` is everything that the line holds."""

    number: int
    instance_id: InstanceId
    prompt: list[Message]
    fields: dict[str, Any]


@dataclass(frozen=True)
class RowProblem:
    """What is wrong with an input file; ``line`` is 1-based, 0 when it is the file as a whole."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return f"{where}: {self.message}"

    def as_error(self) -> InputRefused:
        """The same as an error that a start, or a run, ends with."""
        return InputRefused(
            str(self),
            hint='each line is a JSON object with "prompt": a string or a list of messages',
            field="input_file",
        )


class _BadRow(ValueError):
    pass


def validate_rows(path: str | Path, first: int | None = None) -> RowProblem | None:
    """Check the first ``first`` rows of a file, or all of them; the first problem, or None.

    Besides each row by itself, no two rows may have the same ``instance_id``.
    """
    path, seen = Path(path), _SeenIds()
    number = -1
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if first is not None and number >= first:
                    return None
                if line.strip():
                    seen.add(parse_row(line, number))
    except _BadRow as error:
        return RowProblem(path, number + 1, str(error))
    except OSError as error:
        return RowProblem(path, 0, f"cannot be read: {error.strerror or error}")
    return None if seen.count else RowProblem(path, 0, "holds no rows")


class _SeenIds:
    """Which ids came before, as 8-byte digests: a file may have millions."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    @property
    def count(self) -> int:
        return len(self._digests)

    def add(self, row: Row) -> None:
        digest = blake2b(repr(row.instance_id).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if digest in self._digests:
            raise _BadRow(f"instance_id {row.instance_id!r} was on an earlier line already: ids must be unique")
        self._digests.add(digest)


def parse_row(line: bytes, number: int) -> Row:
    """Read one line. Raises ``ValueError`` that says what is wrong with it."""
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _BadRow(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _BadRow(f"must be a JSON object, is {_kind(fields)}")
    return Row(number, _instance_id(fields.get("instance_id"), number), _prompt(fields), fields)


def _instance_id(value: object, number: int) -> InstanceId:
    if value is None:
        return number
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _BadRow(f"instance_id must be a string or an integer, is {value!r:.100}")
    return value


def _prompt(fields: dict[str, Any]) -> list[Message]:
    if "prompt" not in fields:
        raise _BadRow('has no "prompt"')
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise _BadRow(f'"prompt" must be a string or a list of messages, is {_kind(prompt)}')
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadRow(f'each message of "prompt" must be an object with a "role", one is {message!r:.100}')
    return prompt


def _kind(value: object) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return "an empty list" if value == [] else names.get(type(value), "a number")


class RowFile:
    """A JSONL file that can be passed over several times, in file order or shuffled by a seed."""

    def __init__(self, path: str | Path, shuffle_seed: int | None = None) -> None:
        self.path = Path(path)
        self._shuffle_seed = shuffle_seed

    def rows(self, epoch: int = 0) -> Iterator[Row]:
        """One pass. Raises ``InputRefused`` that names file and line."""
        for number, line in self._lines(epoch):
            yield self._checked(line, number)

    @cached_property
    def num_rows(self) -> int:
        """How many rows the file holds; reads it once. Raises ``InputRefused``."""
        with self._readable() as file:
            return sum(1 for line in file if line.strip())

    @contextmanager
    def _readable(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            raise RowProblem(self.path, 0, f"cannot be read: {error.strerror or error}").as_error() from error

    def _checked(self, line: bytes, number: int) -> Row:
        try:
            return parse_row(line, number)
        except _BadRow as error:
            raise RowProblem(self.path, number + 1, str(error)).as_error() from None

    def _lines(self, epoch: int) -> Iterator[tuple[int, bytes]]:
        with self._readable() as file:
            if self._shuffle_seed is None:
                yield from ((number, line) for number, line in enumerate(file) if line.strip())
                return
            numbers, offsets = self._index
            order = array("Q", range(len(numbers)))
            random.Random(f"{self._shuffle_seed}/{epoch}").shuffle(order)
            for at in order:
                file.seek(offsets[at])
                yield numbers[at], file.readline()

    @cached_property
    def _index(self) -> "tuple[array[int], array[int]]":
        """Line number and offset of every row: 16 bytes each, whatever the rows weigh."""
        numbers, offsets, offset = array("Q"), array("Q"), 0
        with self._readable() as file:
            for number, line in enumerate(file):
                if line.strip():
                    numbers.append(number)
                    offsets.append(offset)
                offset += len(line)
        return numbers, offsets
