"""Rows that an engine returns beside the tokens, such as the experts that each token was routed to.

A row belongs to a token of a turn's whole sequence. The pieces of a rollout's turns lie in one temporary file, because
long rollouts have many megabytes of them, and become parts when the rollout's samples are made.
"""

import logging
import math
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from forebay.core.parts import LENGTHS, NamedPart, pack_arrays
from forebay.core.safetensors_format import ITEM_BYTES, Dtype, Tensor

logger = logging.getLogger(__name__)

RAGGED = (None,)
"""Shape of a row with any number of items."""
MAX_IN_MEMORY = 1 << 20
"""Bytes of rows that a rollout keeps in memory; more go to the temporary file."""


class RowPiece(msgspec.Struct, frozen=True):
    """Rows of one array for the tokens ``[start, end)`` of a turn's sequence."""

    start: int
    end: int
    dtype: Dtype
    shape: tuple[int | None, ...]
    """Shape of one row. Ragged rows have ``lengths`` (int32)."""
    data: bytes | int
    """Its bytes, or where they begin in a ``RowSpool``."""
    lengths: bytes = b""

    @property
    def content(self) -> bytes:
        """The bytes of a piece that is not in a file."""
        assert isinstance(self.data, bytes)
        return self.data

    def between(self, start: int, end: int) -> Self:
        """Return the rows of the tokens ``[start, end)`` of a piece with ``content``, all of one shape."""
        size = len(self.content) // (self.end - self.start)
        data = self.content[size * (start - self.start) : size * (end - self.start)]
        return msgspec.structs.replace(self, start=start, end=end, data=data)

    def items_before(self, row: int) -> int:
        """Number of items in the rows before ``row``."""
        if self.shape == RAGGED:
            return sum(array("i", self.lengths)[:row])
        return row * math.prod(size or 0 for size in self.shape)


Pieces = Mapping[str, Sequence[RowPiece]]
"""Pieces by the name of their array, in the order of tokens."""


def interleaved(low: bytes, high: bytes) -> bytes:
    """Make two-byte numbers of their low and high bytes."""
    made = bytearray(2 * len(low))
    made[::2], made[1::2] = low, high
    return bytes(made)


def widened(data: bytes, dtype: Dtype, wanted: Dtype) -> bytes:
    """Store one-byte numbers in two bytes each, if ``wanted`` needs that."""
    return data if dtype == wanted else interleaved(data, bytes(len(data)))


class RowSpool:
    """The rows of one rollout, in memory or in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY)  # noqa: SIM115 - closed with the rollout's record
        weakref.finalize(self, self._file.close)

    def keep(self, pieces: Pieces) -> dict[str, list[RowPiece]]:
        """Move the bytes of new pieces into the file. If the disk is full, there are no pieces."""
        try:
            return {name: list(map(self._kept, each)) for name, each in pieces.items()}
        except OSError as error:
            logger.warning("arrays of a turn are lost: %s", error)
            return {}

    def _kept(self, piece: RowPiece) -> RowPiece:
        if isinstance(piece.data, int):
            return piece
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(piece.data)
        return msgspec.structs.replace(piece, data=offset)

    def whole(self, pieces: Pieces) -> dict[str, list[RowPiece]]:
        """Return pieces with their bytes."""
        return {
            name: [msgspec.structs.replace(piece, data=self.read(piece)) for piece in each]
            for name, each in pieces.items()
        }

    def read(self, piece: RowPiece, first: int = 0, end: int | None = None) -> bytes:
        """Read rows ``[first, end)`` of a piece, counted from its own first row."""
        size = ITEM_BYTES[piece.dtype]
        begin = size * piece.items_before(first)
        stop = size * piece.items_before(piece.end - piece.start if end is None else end)
        if isinstance(piece.data, bytes):
            return piece.data[begin:stop]
        self._file.seek(piece.data + begin)
        return self._file.read(stop - begin)


class RowStretch(NamedTuple):
    """The rows of a piece for the tokens ``[start, stop)`` of a sample."""

    piece: RowPiece
    start: int
    stop: int


Stretches = Mapping[str, Sequence[RowStretch]]
"""Where the rows of a sample's arrays are, by name."""


class PartWriter:
    """Makes the parts of one rollout's samples. Each row is stored once, in the part of the first sample with it."""

    def __init__(self, file: RowSpool, samples: Sequence[Stretches]) -> None:
        self._file = file
        self._parts: list[NamedPart] = []
        self._used: dict[int, tuple[int, int]] = {}
        """Tokens whose rows the samples need of each piece: the first, and the one after the last."""
        self._dtypes: dict[str, Dtype] = {}
        """The widest type of an array's pieces."""
        self._placed: dict[int, tuple[int, int]] = {}
        """Part of each piece, and the number to add to a token for its row there."""
        listed = ((name, each) for sample in samples for name, found in sample.items() for each in found)
        for name, (piece, start, stop) in listed:
            known = self._used.get(id(piece), (start, stop))
            self._used[id(piece)] = min(known[0], start), max(known[1], stop)
            self._dtypes[name] = max(self._dtypes.get(name, piece.dtype), piece.dtype, key=ITEM_BYTES.__getitem__)

    def fields(self, sample: Stretches) -> dict[str, Any]:
        """Return the fields ``parts`` (each a ``NamedPart``) and ``arrays`` of a sample; empty without rows."""
        if tensors := {key: tensor for name in sample for key, tensor in self._new(name, sample[name])}:
            self._parts.append(pack_arrays(tensors))
        arrays, numbers = dict[str, Any](), dict[int, int]()
        for name, found in sample.items():
            rows = []
            for piece, start, stop in found:
                part, moved = self._placed[id(piece)]
                rows.append([numbers.setdefault(part, len(numbers)), start + moved, start, stop])
            arrays[name] = {"dtype": self._dtypes[name], "shape": list(found[0].piece.shape), "rows": rows}
        return {"parts": [self._parts[number] for number in numbers], "arrays": arrays} if arrays else {}

    def _new(self, name: str, stretches: Sequence[RowStretch]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the pieces that no part has yet."""
        data, lengths, num_rows, dtype = list[bytes](), list[bytes](), 0, self._dtypes[name]
        for piece in (each.piece for each in stretches if id(each.piece) not in self._placed):
            first, end = self._used[id(piece)]
            self._placed[id(piece)] = len(self._parts), num_rows - first
            num_rows += end - first
            data.append(widened(self._file.read(piece, first - piece.start, end - piece.start), piece.dtype, dtype))
            lengths.append(piece.lengths[4 * (first - piece.start) : 4 * (end - piece.start)])
        joined, shape = b"".join(data), stretches[0].piece.shape
        if shape == RAGGED and num_rows:
            yield name + LENGTHS, Tensor("I32", (num_rows,), b"".join(lengths))
            yield name, Tensor(dtype, (len(joined) // ITEM_BYTES[dtype],), joined)
        elif num_rows:
            yield name, Tensor(dtype, (num_rows, *(size or 0 for size in shape)), joined)
