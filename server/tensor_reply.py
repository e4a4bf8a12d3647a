"""A batch as its reader wants it: its rows as JSON, or their arrays as tensors."""

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from forebay.core.sample import Parts
from forebay.core.tensor_blob import ITEM_BYTES, TENSORS_TYPE, blob_head
from forebay.core.token_arrays import as_json, is_binary
from forebay.core.token_rows import P, TokenRow, columns, token_row

Pieces = list[bytes | memoryview]
P_co = TypeVar("P_co", covariant=True)

TENSORS_HEADER = (b"content-type", TENSORS_TYPE.encode())
BYTES_PER_TURN = 1 << 20
"""Of arrays that are turned into text or back, before other work of the server gets its turn."""


def wants_tensors(accept: bytes) -> bool:
    """Whether an Accept header asks for tensors."""
    return any(kind.partition(b";")[0].strip().lower() == TENSORS_TYPE.encode() for kind in accept.split(b","))


class Blob(NamedTuple, Generic[P_co]):
    """A safetensors blob in pieces."""

    pieces: Sequence[P_co | bytes]
    num_bytes: int


async def json_rows(rows: Sequence[Parts]) -> Sequence[Parts]:
    """The rows as JSON: those of binary samples with their arrays as lists. The others stay as they are."""
    if not any(is_binary(row[0]) for row in rows):
        return rows
    made: list[Parts] = []
    turn = _Turn()
    for row in rows:
        if not is_binary(row[0]):
            made.append(row)
            continue
        text = as_json(b"".join(row))
        made.append((text,))
        await turn.did(len(text))
    return made


async def tensor_blob(
    rows: Sequence[Parts], group_sizes: Sequence[int], head: bytes, tail: bytes
) -> Blob[bytes | memoryview]:
    """A safetensors blob. ``head`` and ``tail`` are what the rows stand between in a JSON reply, which ``rest`` holds.

    ``group_sizes`` are the rows of each group.
    """
    turn = _Turn()
    made = []
    for row in rows:
        made.append(token_row(row))
        await turn.did(0 if is_binary(row[0]) else sum(map(len, row)))
    return make_blob(made, group_sizes, head, tail)


def make_blob(rows: Sequence[TokenRow[P]], group_sizes: Sequence[int], head: bytes, tail: bytes) -> Blob[P]:
    """The blob of these rows."""
    rest = [head, b",".join(row.rest for row in rows), tail]
    tensors = columns(rows, group_sizes, rest)
    first = blob_head([(tensor.name, tensor.dtype, tensor.num_items) for tensor in tensors], {"format": "forebay"})
    num_bytes = len(first) + sum(tensor.num_items * ITEM_BYTES[tensor.dtype] for tensor in tensors)
    return Blob([first, *chain.from_iterable(tensor.pieces for tensor in tensors)], num_bytes)


class _Turn:
    """Lets other work go on now and then."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def did(self, num_bytes: int) -> None:
        """Note that so much was done."""
        self._num_bytes += num_bytes
        if self._num_bytes >= BYTES_PER_TURN:
            self._num_bytes = 0
            await asyncio.sleep(0)
