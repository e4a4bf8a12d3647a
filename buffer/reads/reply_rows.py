"""The rows of a reply: the first ones in memory, the others read while earlier ones are sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

import msgspec

from forebay.buffer.groups.sample_group import Sample
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Edited, Outbound, Piece, Slice, stretches
from forebay.core.records.reward_place import Parts, rewards_text, set_reward
from forebay.hooks.types import Row

LOADED_BYTES = 8 << 20
"""Bytes of rows made before a reply begins, so that errors in them are answered instead of breaking it off."""
PROVED_BYTES = 256 << 10
"""Bytes verified before a reply begins whose rows are sent straight from the store."""
CHUNK_BYTES = 1 << 20
"""Bytes of rows made at a time, before other work of the server gets a turn."""

Finish = Callable[[Parts], Parts]
_about: "attrgetter[int]" = attrgetter("num_bytes")


class Planned(msgspec.Struct, frozen=True, gc=False):
    """A row to be made from the stored body of ``sample``, or from the body that a user's hook made."""

    row: Row
    sample: Sample | None
    finish: Finish | None = None
    """Applied last, to the encoded row."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in a reply."""
        return self.sample.num_bytes if self.sample is not None else len(self.row.body or b"")


class Chunk(msgspec.Struct, frozen=True):
    """Some rows, each followed by a comma, and the pieces they were made from."""

    data: bytes | bytearray
    pieces: Sequence[Piece]

    def rows(self) -> Iterator[Parts]:
        """The rows without commas, as views."""
        view, at = memoryview(self.data), 0
        for piece in self.pieces:
            yield (view[at : at + len(piece)],)
            at += len(piece) + 1


class ReplyRows:
    """The encoded rows of a batch, in order. Call ``load`` first.

    Every method that reads raises ``StorageFailed`` for a body that cannot be read.
    """

    def __init__(self, buffer: RunBuffer, planned: Sequence[Planned]) -> None:
        self._buffer = buffer
        self.planned = planned
        self._loaded: list[Chunk] = []
        self._num_loaded = 0

    def __len__(self) -> int:
        return len(self.planned)

    def __iter__(self) -> Iterator[Parts]:
        """Every row, if the batch ``is_whole``."""
        assert self.is_whole, "`load_all` reads the rows that are not in memory"
        for chunk in self._loaded:
            yield from chunk.rows()

    @property
    def is_whole(self) -> bool:
        """Whether all rows are in memory."""
        return self._num_loaded == len(self.planned)

    @property
    def may_be_binary(self) -> bool:
        """Whether a row may come from a binary sample, whose arrays are not JSON."""
        return any(each.sample is not None and each.sample.head != b"" for each in self.planned)

    @property
    def num_bytes(self) -> int:
        """Total size of all rows, each followed by a comma."""
        # Rewards are replaced, so a row's length differs from its stored body's.
        rest = islice(self.planned, self._num_loaded, None)
        return sum(len(chunk.data) for chunk in self._loaded) + sum(_size(planned) + 1 for planned in rest)

    def outbound(self) -> list[Outbound] | None:
        """The rows with commas between them; rows not in memory are sent by the store.

        None if one of these cannot be sent that way, or if there are none.
        """
        pieces = list(map(_edited, self.planned[self._num_loaded :]))
        if not pieces or None in pieces:
            return None
        made = [piece for piece in pieces if piece is not None]
        *most, last = made
        assert isinstance(last, Edited)
        at = last.location
        loaded = [memoryview(chunk.data) for chunk in self._loaded]
        # An `Edited` piece is followed by a comma, which the last row must not have.
        return [*loaded, *most, Slice(at, 0, last.start), last.text, Slice(at, last.stop, at.length)]

    async def load(self) -> None:
        """Make the first rows."""
        await self._load(LOADED_BYTES)

    async def prove(self, up_to: int | None = None) -> None:
        """Verify bodies of rows not in memory, for the first ``up_to`` bytes or all; raises what sending would."""
        for part in self._parts(self._num_loaded, up_to):
            samples = [each.sample for each in part if each.sample is not None]
            await self._buffer.store.prove([each.location for each in samples if each.location is not None])

    async def measure(self) -> None:
        """Make ``num_bytes`` exact: also makes the other rows if their size depends on their bodies."""
        if not self.is_whole and await self._hides_sizes(self.planned[self._num_loaded :]):
            await self._load()

    async def load_all(self) -> None:
        """Make all rows that are not in memory."""
        await self._load()

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield all rows, some at a time; rows that were not in memory are not kept."""
        for chunk in self._loaded:
            yield chunk
        async for chunk in self._made():
            yield chunk

    async def _load(self, up_to: int | None = None) -> None:
        async for chunk in self._made(up_to):
            self._loaded.append(chunk)
            self._num_loaded += len(chunk.pieces)

    async def _made(self, up_to: int | None = None) -> AsyncIterator[Chunk]:
        """Yield the rows not in memory, some at a time, up to about ``up_to`` bytes.

        The next ones are read while the caller works.
        """
        parts = self._parts(self._num_loaded, up_to)
        reading = [self._start(planned) for planned in islice(parts, 1)]
        try:
            while reading:
                chunk = await reading[0]
                # Only one ahead: a reader that stops reading must not fill the memory.
                reading[:] = [self._start(planned) for planned in islice(parts, 1)]
                yield chunk
        finally:
            # A caller that stops half-way leaves a read in flight, whose files must be closed.
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def _start(self, planned: Sequence[Planned]) -> "asyncio.Task[Chunk]":
        return asyncio.create_task(self._make(planned))

    def _parts(self, start: int, up_to: int | None) -> Iterator[Sequence[Planned]]:
        total = 0
        for part, num_bytes in stretches(self.planned[start:], _about, CHUNK_BYTES):
            yield part
            total += num_bytes
            if up_to is not None and total >= up_to:
                return

    async def _make(self, planned: Sequence[Planned]) -> Chunk:
        pieces = list(map(_edited, planned))
        if None in pieces:
            whole = [each.sample for each in planned if each.sample is not None and _is_read_whole(each)]
            bodies = iter(await self._buffer.bodies(whole) if whole else ())
            pieces = [piece or _piece(each, bodies) for piece, each in zip(pieces, planned, strict=True)]
        made = [piece for piece in pieces if piece is not None]
        return Chunk(await self._buffer.store.gather(made), made)

    async def _hides_sizes(self, planned: Sequence[Planned]) -> bool:
        if any(_is_read_whole(each) for each in planned):
            return True
        samples = [each.sample for each in planned if each.sample is not None]
        if any(sample.head is None for sample in samples):
            await self._buffer.find_heads(samples)
        return any(sample.head for sample in samples)


def _is_read_whole(planned: Planned) -> bool:
    """Whether making the row requires the body."""
    return planned.finish is not None or (planned.sample is not None and planned.sample.row.reward_span is None)


def _edited(planned: Planned) -> Piece | None:
    """The row as a stored body with new rewards; None if it must be made differently."""
    row, sample = planned.row, planned.sample
    if sample is None or planned.finish is not None or sample.location is None or sample.row.reward_span is None:
        return None
    start, stop = sample.row.reward_span
    return Edited(sample.location, start, stop, rewards_text(row.reward, row.raw_reward))


def _piece(planned: Planned, bodies: Iterator[bytes]) -> Piece:
    """Make a row that ``_edited`` cannot; ``bodies`` yields the bodies that are read."""
    row, sample = planned.row, planned.sample
    if sample is None:
        made: Parts = (row.body or b"",)
    elif _is_read_whole(planned):
        made = set_reward(next(bodies), sample.row.reward_span, row.reward, row.raw_reward)
    else:  # the disk does not have it yet
        made = set_reward(sample.body or b"", sample.row.reward_span, row.reward, row.raw_reward)
    return b"".join(planned.finish(made) if planned.finish else made)


def _size(planned: Planned) -> int:
    """Size of a row made without its body."""
    row, sample = planned.row, planned.sample
    if sample is None or sample.row.reward_span is None:
        return planned.num_bytes
    start, end = sample.row.reward_span
    return sample.num_bytes - (end - start) + len(rewards_text(row.reward, row.raw_reward))
