"""Reading task rows from a JSONL file: streamed, checked, numbered, and shuffled without holding the file."""

import os
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from forebay.core.starts.input_file import InputLimits, LineTooLong
from forebay.core.task_row import BadRow, RowProblem, TaskRow, parse_row


def validate_rows(path: str | Path, first: int | None = None, limits: InputLimits | None = None) -> RowProblem | None:
    """Check the first ``first`` rows of a file, or all of them. Returns the first problem, or None.

    No two rows may have the same ``instance_id``. ``limits`` defaults to the limits of this process.
    """
    path, seen, limits = Path(path), _SeenIds(), limits or InputLimits.of(os.environ)
    number = -1
    try:
        with limits.open(path) as file:
            for line in limits.lines(file):
                number += 1
                if first is not None and number >= first:
                    return None
                if line.strip():
                    seen.add(parse_row(line, number))
    except LineTooLong as error:
        return RowProblem(path, number + 2, str(error))
    except BadRow as error:
        return RowProblem(path, number + 1, str(error))
    except OSError as error:
        return RowProblem(path, 0, f"cannot be read: {error.strerror or error}")
    return None if seen.count else RowProblem(path, 0, "holds no rows")


class _SeenIds:
    """Ids seen so far, as 8-byte digests because a file may have millions."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    @property
    def count(self) -> int:
        return len(self._digests)

    def add(self, row: TaskRow) -> None:
        # By `repr`, because the ids 1 and "1" differ.
        digest = blake2b(repr(row.instance_id).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if digest in self._digests:
            raise BadRow(f"instance_id {row.instance_id!r} is also on an earlier line: ids must be unique")
        self._digests.add(digest)


class RowFile:
    """A JSONL file that can be read several times, in file order or shuffled by a seed."""

    def __init__(self, path: str | Path, shuffle_seed: int | None = None) -> None:
        self.path = Path(path)
        self._limits = InputLimits.of(os.environ)
        self._shuffle_seed = shuffle_seed

    def rows(self, epoch: int = 0) -> Iterator[TaskRow]:
        """Yield the rows of one pass. Raises ``InputRefused`` with file and line."""
        for number, line in self._lines(epoch):
            yield self._checked(line, number)

    @cached_property
    def num_rows(self) -> int:
        """Number of rows in the file. Reads it once. Raises ``InputRefused``."""
        with self._readable() as file:
            return sum(1 for line in self._limits.lines(file) if line.strip())

    @contextmanager
    def _readable(self) -> Iterator[BinaryIO]:
        try:
            with self._limits.open(self.path) as file:
                yield file
        except LineTooLong as error:
            raise RowProblem(self.path, 0, f"holds a line that is {error}").as_error() from None
        except OSError as error:
            raise RowProblem(self.path, 0, f"cannot be read: {error.strerror or error}").as_error() from error

    def _checked(self, line: bytes, number: int) -> TaskRow:
        try:
            return parse_row(line, number)
        except BadRow as error:
            raise RowProblem(self.path, number + 1, str(error)).as_error() from None

    def _lines(self, epoch: int) -> Iterator[tuple[int, bytes]]:
        with self._readable() as file:
            if self._shuffle_seed is None:
                yield from ((number, line) for number, line in enumerate(self._limits.lines(file)) if line.strip())
                return
            numbers, offsets = self._index
            order = array("Q", range(len(numbers)))
            # With a text seed, Random gives the same order in every process, on which resumed runs rely.
            random.Random(f"{self._shuffle_seed}/{epoch}").shuffle(order)
            for at in order:
                file.seek(offsets[at])
                yield numbers[at], next(self._limits.lines(file), b"")

    @cached_property
    def _index(self) -> "tuple[array[int], array[int]]":
        """Line number and offset of every row."""
        # 16 bytes per row of any size, because files have millions of rows.
        numbers, offsets, offset = array("Q"), array("Q"), 0
        with self._readable() as file:
            for number, line in enumerate(self._limits.lines(file)):
                if line.strip():
                    numbers.append(number)
                    offsets.append(offset)
                offset += len(line)
        return numbers, offsets
