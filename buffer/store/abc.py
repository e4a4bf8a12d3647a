"""What a store promises. Every implementation passes the same contract suite (``tests/contracts``)."""

from abc import ABC, abstractmethod
from asyncio import Future, get_running_loop
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from socket import socket
from typing import Self, TypeVar

import msgspec

from forebay.core.errors import StorageFailed
from forebay.core.ids import InstanceId
from forebay.core.records.rows import (
    REMOVED,
    BatchRow,
    CheckpointRow,
    FoundGroup,
    GroupRow,
    Location,
    Row,
    RunRow,
    StartRow,
    StoredSample,
)
from forebay.core.waiting import finish

T = TypeVar("T")

NEWEST_GROUPS = 4
"""So many groups of an instance are looked up for a writer that sends no epoch, those of the latest epochs first."""

Done = Callable[[Location | None, StorageFailed | None], None]
"""Called when an append has ended, with the body's location or the error."""


class Slice(msgspec.Struct, frozen=True, gc=False):
    """The bytes of a stored body from ``start`` to ``stop``."""

    location: Location
    start: int
    stop: int
    is_proved: bool = False
    """Whether the body was found to be what was written, so that no more than these bytes need be read."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Location:
        """Where these bytes lie."""
        at = self.location
        return Location(at.segment, at.offset + self.start, self.stop - self.start)


class Edited(msgspec.Struct, frozen=True, gc=False):
    """A stored body with ``text`` in the place of its bytes from ``start`` to ``stop``."""

    location: Location
    start: int
    stop: int
    text: bytes

    def __len__(self) -> int:
        return self.location.length + self.start - self.stop + len(self.text)


Piece = bytes | memoryview | Edited
"""What a reply is put together from."""

Outbound = Piece | Slice
"""What is sent straight to a socket: an ``Edited`` one with a comma behind it, everything else as it is."""


class GroupBodies(msgspec.Struct, frozen=True, gc=False):
    """The bodies of the samples that name one group, as far as they lie in one segment."""

    run_id: str
    group_id: str
    num_bytes: int
    newest_at_s: float
    """Wall-clock seconds at which the last of them arrived."""


class Segment(msgspec.Struct, frozen=True):
    """A part of what is stored to which nothing is added any more, and which can only be removed as a whole."""

    number: int
    num_bytes: int
    groups: Sequence[GroupBodies]


class StoreStats(msgspec.Struct):
    """What the store holds and what it found wrong."""

    num_bytes: int = 0
    num_segments: int = 0
    num_quarantined: int = 0
    """Corrupt records set aside since the store was opened."""
    num_torn_bytes: int = 0
    """Bytes of an unfinished last write that were cut at opening."""
    location: str = ""
    takes_writes: bool = True
    """False after a failed append, until ``recover``."""


class Store(ABC):
    """Durable rows and bodies, in one order.

    - **Atomic and in order.** The rows and the body of one ``append`` survive together or not at all, and never
      without every earlier one.
    - **Durable.** The future is done only after the disk has confirmed. ``kill -9`` or a power cut later loses
      nothing.
    - **Failure stops everything.** When an append fails, it and all later ones raise ``StorageFailed``, and none of
      them happened, until ``recover`` succeeds. The caller then loads its state again, as after a crash.
    - **Whole values.** A row replaces the row of the same key: run and start (``run_id``), group (``run_id,
      group_id``), sample (``run_id, group_id, uid``), batch (``run_id, batch_id``), checkpoint (``run_id, step``). A
      ``ColumnsRow`` replaces every sample of its group whose body is in its segment.
      A tick replaces the run's ``active_s``, which a run or sample row may also raise, never lower.
    - A sample row whose group has no row yet opens it (state open, ``opened_s`` = the sample's ``at_s``), if it is a
      member.

    Appends are called from the event loop's thread and return at once; reads and queries are coroutines that leave the
    loop free and see every append that was called before them and did not fail.
    """

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open, mend what a crash left, and bring the index up to date. Raises ``StorageFailed``."""

    @abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Write what is queued and close."""

    @abstractmethod
    def submit(self, rows: Sequence[Row], body: bytes | memoryview | None, done: Done) -> None:
        """Queue one atomic entry, with the rows as they are now.

        At most one of ``rows`` is a sample row, and then ``body`` is its body, which must not change until ``done`` was
        called: in the loop's thread, in the order of the appends. Raises ``InvalidInput`` for an epoch or a slot beyond
        64 bits, and ``EntryTooLarge``; then nothing was queued, and others may append as before.
        """

    def append(self, rows: Sequence[Row], body: bytes | memoryview | None = None) -> "Future[Location | None]":
        """As ``submit``, with a future of the body's location. A cancelled future does not undo the append."""
        future: Future[Location | None] = get_running_loop().create_future()
        self.submit(rows, body, partial(finish, future))
        return future

    @abstractmethod
    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        """The bodies at ``locations``, in that order.

        Raises ``StorageFailed`` for one that cannot be read, ``BodyUnreadable`` for one that is gone, or not what was
        written: as everything does that reads, slices and parts of replies included.
        """

    async def prove(self, locations: Sequence[Location]) -> None:
        """Raise what ``read`` would raise, without handing anything out."""
        await self.read(locations)

    async def read_slices(self, slices: Sequence[Slice]) -> list[bytes]:
        """Stretches of bodies, in that order. Raises ``StorageFailed`` for one that cannot be read."""
        # Whole bodies: only a store with files can read less of one.
        bodies = await self.read([each.location for each in slices])
        return [body[each.start : each.stop] for each, body in zip(slices, bodies, strict=True)]

    async def gather(self, pieces: Sequence[Piece]) -> bytes | bytearray:
        """``pieces``, one behind the other, with a comma behind each. Raises ``StorageFailed`` as ``read`` does."""
        bodies = iter(await self.read([piece.location for piece in pieces if isinstance(piece, Edited)]))
        made = (_edit(next(bodies), piece) if isinstance(piece, Edited) else piece for piece in pieces)
        return b"".join(part for piece in made for part in (piece, b","))

    async def send(self, pieces: Sequence[Outbound], connection: socket) -> bool:  # noqa: ARG002 - the default cannot
        """Send ``pieces`` over a socket that does not block; False if this store has no way to do that by itself.

        Raises ``StorageFailed`` for what cannot be read, and ``ConnectionError`` when nobody is there any more. Part of
        the bytes may be sent then.
        """
        return False

    @abstractmethod
    async def recover(self) -> None:
        """After a failed append: cut off what was not confirmed, and check that the disk takes writes again.

        Raises ``StorageFailed`` while it does not.
        """

    @property
    def is_on_reserve(self) -> bool:
        """Whether the disk is full, and takes only entries without bodies, by what was kept for that."""
        return False

    def check_room(self) -> None:
        """Raise ``StorageFailed`` where something new is not to be taken, since the store ``is_on_reserve``."""
        if self.is_on_reserve:
            reason = "what is stored can be read and acknowledged, and nothing new is taken"
            hint = "make room where the data directory lies; writing then resumes by itself"
            raise StorageFailed(reason, what="the disk is full", hint=hint)

    @abstractmethod
    async def load_runs(self) -> list[RunRow]:
        """Every run, oldest first, with its last recorded ``active_s``."""

    @abstractmethod
    async def load_start(self, run_id: str) -> StartRow | None:
        """What the run was last started with; None if its record is damaged."""

    @abstractmethod
    async def load_groups(self, run_id: str) -> list[GroupRow]:
        """Every group of the run, in the order in which they opened.

        Counts of open groups may be 0: count the samples.
        """

    @abstractmethod
    async def load_samples(self, run_id: str) -> list[StoredSample]:
        """The member samples of the run's open, ready and leased groups, in the order in which they came."""

    @abstractmethod
    async def load_batches(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[BatchRow]:
        """The run's batches behind the one of number ``after``, in the order of their numbers."""

    @abstractmethod
    async def find_batches(self, run_id: str, batch_ids: Sequence[str]) -> list[BatchRow]:
        """Those of these batches that there are."""

    @abstractmethod
    async def load_checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """Every checkpoint of the run, forgotten ones included, by step."""

    @abstractmethod
    async def uids_by_group(self, run_id: str, limit: int | None = None) -> dict[str, list[str]] | None:
        """The uids of the run's samples by the group that they name; None if they are more than about ``limit``."""

    @abstractmethod
    async def catch_up(self) -> None:
        """Let ``find`` know of every append that was called before. Raises ``StorageFailed``."""

    @abstractmethod
    async def find(
        self, run_id: str, group_ids: Sequence[str], instance_ids: Sequence[InstanceId] = (), *, has_uids: bool = True
    ) -> list[FoundGroup]:
        """These groups, whether they are there or not, and the ``NEWEST_GROUPS`` of each of these instances.

        Cheap, and so it need not know of appends that were called after the last ``catch_up``.
        """

    @abstractmethod
    async def closed_groups(self, run_id: str, after: int) -> list[GroupRow]:
        """The run's closed groups from the one behind ``after`` on, by ``closed_seq``."""

    @abstractmethod
    async def groups(
        self, run_id: str, *, state: str | None = None, after: str = "", limit: int = 100
    ) -> list[GroupRow]:
        """A page of the run's groups in the order in which they opened: those behind the group ``after``."""

    @abstractmethod
    async def samples(self, run_id: str, group_id: str) -> list[StoredSample]:
        """Every sample that names the group, late and surplus ones included, in the order in which they came."""

    @abstractmethod
    async def samples_of(self, run_id: str, group_ids: Sequence[str]) -> dict[str, list[StoredSample]]:
        """The same for many groups at once, by group; those that nothing names have an empty list."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Sizes and faults, without touching the disk."""

    # --- removing whole segments. Only one caller at a time.

    async def remove_run(self, run_id: str) -> None:
        """Forget everything of a run but its bodies, which go with their segments. Raises ``StorageFailed``.

        Nothing of the run may be appended behind it.
        """
        row = RunRow(run_id=run_id, name="", task_type="", state=REMOVED, created_at_s=0.0, active_s=0.0, document={})
        await self.append([row])

    @abstractmethod
    async def has_bodies(self, run_id: str) -> bool:
        """Whether any body of the run is still there."""

    @abstractmethod
    async def segments(self) -> list[Segment]:
        """Every segment but the one that is written to, oldest first."""

    @abstractmethod
    async def num_row_bytes(self, segment: int) -> int:
        """About how many bytes ``clear`` writes again, besides the bodies of groups that are moved."""

    @abstractmethod
    def holds(self, location: Location) -> bool:
        """Whether the body is there, and its segment not about to be removed."""

    @abstractmethod
    def has_removed(self, location: Location) -> bool:
        """Whether the segment of the body is gone for good."""

    @abstractmethod
    async def wait_for_removals(self) -> None:
        """Wait until no segment is about to be removed: bodies then stay where they are, or are gone."""

    @abstractmethod
    def begin_removal(self, segment: int) -> None:
        """The segment is about to be removed: from now on ``holds`` is false for everything in it."""

    @abstractmethod
    def cancel_removal(self, segment: int) -> None:
        """Undo ``begin_removal``, unless the segment is removed."""

    @abstractmethod
    async def clear(self, segment: int, moved: Collection[tuple[str, str]]) -> None:
        """Write again, behind everything else, all that only this segment tells, and wait for the disk.

        Of the groups ``moved`` (run and group), the bodies as well: their samples have other locations afterwards. Of
        all other samples everything but the body stays known once the segment is removed. Raises ``StorageFailed``;
        nothing is lost then, and it can be done again.
        """

    @abstractmethod
    async def remove(self, segment: int) -> None:
        """Remove a segment whose removal was begun and that was cleared, after the reads that have begun.

        Raises ``StorageFailed``; the segment is still there then, or gone already.
        """


def stretches(items: Sequence[T], num_bytes: Callable[[T], int], limit: int) -> Iterator[tuple[Sequence[T], int]]:
    """``items`` in parts of up to ``limit`` bytes, each with its bytes; an item that is longer stands alone."""
    first = size = 0
    for place, item in enumerate(items):
        own = num_bytes(item)
        if place > first and size + own > limit:
            yield items[first:place], size
            first, size = place, 0
        size += own
    if first < len(items):
        yield items[first:], size


def num_sent(piece: Outbound) -> int:
    """The bytes that a piece takes on its way."""
    return len(piece) + isinstance(piece, Edited)


def _edit(body: bytes, piece: Edited) -> bytes:
    return b"".join((body[: piece.start], piece.text, body[piece.stop :]))
