"""The rows of a batch on their way out: the first ones in memory, the others read while those before them are sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

import msgspec

from forebay.buffer.groups.sample_group import Sample
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Edited, Outbound, Piece, Slice, stretches
from forebay.core.reward_place import Parts, rewards_text, set_reward
from forebay.hooks.types import Row

LOADED_BYTES = 8 << 20
"""Of rows that are made before a reply begins: what is wrong with them is answered, not a broken connection."""
PROVED_BYTES = 256 << 10
"""The same of rows that are sent straight from the store, for which nothing is made before."""
CHUNK_BYTES = 1 << 20
"""Of rows that are made at a time, before other work of the server gets its turn."""

Finish = Callable[[Parts], Parts]
_about: "attrgetter[int]" = attrgetter("num_bytes")


class Planned(msgspec.Struct, frozen=True, gc=False):
    """A row to be made: of the stored body of ``sample``, or of the body that a user's hook made of it."""

    row: Row
    sample: Sample | None
    finish: Finish | None = None
    """What is done to the encoded row last."""

    @property
    def num_bytes(self) -> int:
        """About what it takes in a reply."""
        return self.sample.num_bytes if self.sample is not None else len(self.row.body or b"")


class Chunk(msgspec.Struct, frozen=True):
    """Some rows, each with a comma behind it, and what they were put together from."""

    data: bytes | bytearray
    pieces: Sequence[Piece]

    def rows(self) -> Iterator[Parts]:
        """The rows without commas, as views."""
        view, at = memoryview(self.data), 0
        for piece in self.pieces:
            yield (view[at : at + len(piece)],)
            at += len(piece) + 1


class ReplyRows:
    """The encoded rows of a batch, in order; ``len`` tells how many. To be ``load``-ed first.

    Whatever reads raises ``StorageFailed`` for a body that cannot be read.
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
        """Whether every row is in memory."""
        return self._num_loaded == len(self.planned)

    @property
    def may_be_binary(self) -> bool:
        """Whether a row may be of a binary sample, whose arrays are no JSON."""
        return any(each.sample is not None and each.sample.head != b"" for each in self.planned)

    @property
    def num_bytes(self) -> int:
        """What all rows take together, with a comma behind each."""
        # Rewards are replaced by others, thus the length of a stored body is not that of its row.
        rest = islice(self.planned, self._num_loaded, None)
        return sum(len(chunk.data) for chunk in self._loaded) + sum(_size(planned) + 1 for planned in rest)

    def outbound(self) -> list[Outbound] | None:
        """The rows with commas between them, those that are not in memory as the store sends them.

        None unless every one of these can be sent so, or if there is none.
        """
        pieces = list(map(_edited, self.planned[self._num_loaded :]))
        if not pieces or None in pieces:
            return None
        made = [piece for piece in pieces if piece is not None]
        *most, last = made
        assert isinstance(last, Edited)
        at = last.location
        loaded = [memoryview(chunk.data) for chunk in self._loaded]
        # An `Edited` piece is sent with a comma behind it, which the last row must not have.
        return [*loaded, *most, Slice(at, 0, last.start), last.text, Slice(at, last.stop, at.length)]

    async def load(self) -> None:
        """Make the first rows."""
        await self._load(LOADED_BYTES)

    async def prove(self, up_to: int | None = None) -> None:
        """Raise what sending the rows would raise that are not in memory: of the first ``up_to`` bytes, or of all."""
        for part in self._parts(self._num_loaded, up_to):
            samples = [each.sample for each in part if each.sample is not None]
            await self._buffer.store.prove([each.location for each in samples if each.location is not None])

    async def measure(self) -> None:
        """Make the other rows too, if only their bodies tell how long they will be: ``num_bytes`` is right then."""
        if not self.is_whole and await self._hides_sizes(self.planned[self._num_loaded :]):
            await self._load()

    async def load_all(self) -> None:
        """Make the rows that are not in memory."""
        await self._load()

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Every row, some at a time; those that were not in memory are forgotten again."""
        for chunk in self._loaded:
            yield chunk
        async for chunk in self._made():
            yield chunk

    async def _load(self, up_to: int | None = None) -> None:
        async for chunk in self._made(up_to):
            self._loaded.append(chunk)
            self._num_loaded += len(chunk.pieces)

    async def _made(self, up_to: int | None = None) -> AsyncIterator[Chunk]:
        """The rows that are not in memory, some at a time; no more of them than take about ``up_to`` bytes.

        The next ones are read while the caller waits for something else.
        """
        parts = self._parts(self._num_loaded, up_to)
        reading = [self._start(planned) for planned in islice(parts, 1)]
        try:
            while reading:
                chunk = await reading[0]
                # One ahead, and no more: a reader that takes nothing must not fill the memory.
                reading[:] = [self._start(planned) for planned in islice(parts, 1)]
                yield chunk
        finally:
            # Who stops half-way leaves a read in flight, whose files must be closed.
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
    """Whether the body must be seen to make the row."""
    return planned.finish is not None or (planned.sample is not None and planned.sample.row.reward_span is None)


def _edited(planned: Planned) -> Piece | None:
    """The row as a stored body with other rewards; None if it must be made in another way."""
    row, sample = planned.row, planned.sample
    if sample is None or planned.finish is not None or sample.location is None or sample.row.reward_span is None:
        return None
    start, stop = sample.row.reward_span
    return Edited(sample.location, start, stop, rewards_text(row.reward, row.raw_reward))


def _piece(planned: Planned, bodies: Iterator[bytes]) -> Piece:
    """What the store makes any other row of. ``bodies`` has those that are read whole."""
    row, sample = planned.row, planned.sample
    if sample is None:
        made: Parts = (row.body or b"",)
    elif _is_read_whole(planned):
        made = set_reward(next(bodies), sample.row.reward_span, row.reward, row.raw_reward)
    else:  # the disk does not have it yet
        made = set_reward(sample.body or b"", sample.row.reward_span, row.reward, row.raw_reward)
    return b"".join(planned.finish(made) if planned.finish else made)


def _size(planned: Planned) -> int:
    """The length of a row that is not read whole."""
    row, sample = planned.row, planned.sample
    if sample is None or sample.row.reward_span is None:
        return planned.num_bytes
    start, end = sample.row.reward_span
    return sample.num_bytes - (end - start) + len(rewards_text(row.reward, row.raw_reward))
