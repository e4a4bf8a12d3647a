"""Encodes a batch as its reader asks: rows as JSON, or their arrays as tensors.

Tensors of binary samples are read while they are sent, so that only one stretch of them is in memory.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.types import Scope

from forebay.buffer.reads.reply_rows import Planned, ReplyRows
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Slice, Store, stretches
from forebay.core.batch_tensors import Numbers, P, Stretch, TokenRow, columns, make_row, read_numbers, token_row
from forebay.core.binary_sample import HEAD_BYTES, FieldOffsets, as_json, is_binary, read_offsets
from forebay.core.records.reward_place import Parts, rewards_text
from forebay.core.records.rows import Location
from forebay.core.safetensors_format import ITEM_BYTES, TENSORS_TYPE, blob_head
from forebay.server.direct_send import direct_reply
from forebay.web.replies import HttpReply

Pieces = list[bytes | memoryview]
Stored = Slice | bytes | memoryview
"""A piece of a blob; a ``Slice`` is only in the store."""
Frame = tuple[bytes, bytes]
P_co = TypeVar("P_co", covariant=True)

TENSORS_HEADER = (b"content-type", TENSORS_TYPE.encode())
BYTES_PER_TURN = 1 << 20
"""Array bytes converted to text or back before other work of the server gets a turn."""
STRETCH_BYTES = 1 << 20
"""Bytes read at a time."""


def wants_tensors(accept: bytes) -> bool:
    """Whether an Accept header asks for tensors."""
    return any(kind.partition(b";")[0].strip().lower() == TENSORS_TYPE.encode() for kind in accept.split(b","))


class Blob(NamedTuple, Generic[P_co]):
    """A safetensors blob in pieces."""

    pieces: Sequence[P_co | bytes]
    num_bytes: int


async def json_rows(rows: Sequence[Parts]) -> Sequence[Parts]:
    """The rows as JSON. Arrays of binary samples become lists; other rows are unchanged."""
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
    """Make a safetensors blob. ``head`` and ``tail`` enclose the rows in a JSON reply; the blob has both as ``rest``.

    ``group_sizes`` has the number of rows of each group.
    """
    turn = _Turn()
    made = []
    for row in rows:
        made.append(token_row(row))
        await turn.did(0 if is_binary(row[0]) else sum(map(len, row)))
    return make_blob(made, group_sizes, head, tail)


def make_blob(rows: Sequence[TokenRow[P]], group_sizes: Sequence[int], head: bytes, tail: bytes) -> Blob[P]:
    """Make the blob of these rows."""
    rest = [head, b",".join(row.rest for row in rows), tail]
    tensors = columns(rows, group_sizes, rest)
    first = blob_head([(tensor.name, tensor.dtype, (tensor.num_items,)) for tensor in tensors], {"format": "forebay"})
    num_bytes = len(first) + sum(tensor.num_items * ITEM_BYTES[tensor.dtype] for tensor in tensors)
    return Blob([first, *chain.from_iterable(tensor.pieces for tensor in tensors)], num_bytes)


class _Turn:
    """Gives other work a turn now and then."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def did(self, num_bytes: int) -> None:
        """Count ``num_bytes`` as done, and yield to the loop if it is time."""
        self._num_bytes += num_bytes
        if self._num_bytes >= BYTES_PER_TURN:
            self._num_bytes = 0
            await asyncio.sleep(0)


async def tensor_reply(
    scope: Scope, buffer: RunBuffer, rows: ReplyRows, group_sizes: Sequence[int], frame: Frame
) -> HttpReply:
    """The reply with these rows as tensors. ``frame`` encloses the rows in a JSON reply.

    ``group_sizes`` has the number of rows of each group. Raises ``StorageFailed``, also while the reply is sent.
    """
    await buffer.find_heads([each.sample for each in rows.planned if each.sample is not None])
    blob: Blob[Stored] | None = await stored_blob(buffer.store, rows.planned, group_sizes, *frame)
    if blob is None:  # some row was finished by a hook, or is JSON: the store does not have its arrays as sent
        await rows.load_all()
        blob = await tensor_blob(list(rows), group_sizes, *frame)
    usual = read_pieces(buffer.store, blob.pieces)
    return direct_reply(scope, TENSORS_HEADER, buffer.store, blob.pieces, blob.num_bytes, usual)


async def stored_blob(
    store: Store, planned: Sequence[Planned], group_sizes: Sequence[int], head: bytes, tail: bytes
) -> Blob[Slice] | None:
    """The blob that ``tensor_blob`` would make; None unless every row is a stored binary sample.

    Only the samples' JSON stays in memory; checksums of all are verified. Raises ``StorageFailed``.
    """
    locations = [at for each in planned if (at := _location(each)) is not None]
    if len(locations) < len(planned):
        return None
    # The JSON follows the arrays: one read covers all rows, however large their arrays are.
    offsets = [read_offsets(each.sample.head or b"") for each in planned if each.sample is not None]
    texts = await store.read_slices([Slice(a, p.json, a.length) for a, p in zip(locations, offsets, strict=True)])
    lengths = _response_lengths(texts)
    rows = [_row(*each) for each in zip(planned, locations, offsets, texts, lengths, strict=True)]
    return make_blob(rows, group_sizes, head, tail)


def _location(planned: Planned) -> Location | None:
    """Where the binary sample is stored, if only its reward changes; else None."""
    sample = planned.sample
    is_plain = sample is not None and sample.head and sample.row.reward_span is not None and not planned.finish
    return sample.location if sample is not None and is_plain else None


def _row(planned: Planned, at: Location, offsets: FieldOffsets, text: bytes, response_length: Any) -> TokenRow[Slice]:
    sample, row = planned.sample, planned.row
    assert sample is not None
    assert sample.row.reward_span is not None
    start, end = sample.row.reward_span
    # The span counts from the start of the body; ``text`` is only its JSON.
    rest = text[: start - offsets.json] + rewards_text(row.reward, row.raw_reward) + text[end - offsets.json :]
    return make_row(
        Stretch(offsets.num_tokens, _proved(at, HEAD_BYTES, offsets.logprobs)),
        _stretch(at, offsets.logprobs, offsets.loss_mask, 4) if offsets.has_logprobs else None,
        _stretch(at, offsets.loss_mask, offsets.json, 1) if offsets.has_loss_mask else None,
        rest,
        Numbers(row.reward, row.raw_reward, response_length, sample.row.oldest_version),
    )


def _stretch(at: Location, start: int, stop: int, item_size: int) -> Stretch[Slice]:
    return Stretch((stop - start) // item_size, _proved(at, start, stop))


def _proved(at: Location, start: int, stop: int) -> Slice:
    # The whole body was verified when its JSON was read; one array of all rows is sent before the next.
    return Slice(at, start, stop, is_proved=True)


def _response_lengths(texts: Sequence[bytes]) -> Iterable[Any]:
    # Few rows have this field, so all are searched at once: decoding each would cost more than the rest.
    if not _may_name_length(b"".join(texts)):
        return repeat(None, len(texts))
    return [read_numbers(text).response_length if _may_name_length(text) else None for text in texts]


def _may_name_length(text: bytes) -> bool:
    # A key may be written with escapes.
    return b'"response_length"' in text or b"\\u" in text


async def read_pieces(store: Store, stored: Sequence[Stored]) -> AsyncIterator[Pieces]:
    """Read the bytes of a blob, one stretch at a time. Raises ``StorageFailed``."""
    for stretch, _ in stretches(stored, len, STRETCH_BYTES):
        yield await _read(store, stretch)


async def _read(store: Store, stored: Sequence[Stored]) -> Pieces:
    # One call for all slices of a stretch: adjacent ones in the store are read at once.
    found = iter(await store.read_slices([piece for piece in stored if isinstance(piece, Slice)]))
    return [next(found) if isinstance(piece, Slice) else piece for piece in stored]
