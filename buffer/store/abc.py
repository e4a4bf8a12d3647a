"""The specification of a store. Every implementation passes the same contract suite (``tests/contracts``)."""

from abc import ABC, abstractmethod
from asyncio import Event, Future, get_running_loop
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
"""Maximum number of an instance's groups looked up for a writer without epochs, latest epochs first."""

Done = Callable[[Location | None, StorageFailed | None], None]
"""Called when an append has ended, with the body's location or the error."""


class Slice(msgspec.Struct, frozen=True, gc=False):
    """The bytes of a stored body from ``start`` to ``stop``."""

    location: Location
    start: int
    stop: int
    is_proved: bool = False
    """Whether the body was verified already, so that only these bytes need be read."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Location:
        """Location of these bytes."""
        at = self.location
        return Location(at.segment, at.offset + self.start, self.stop - self.start)


class Edited(msgspec.Struct, frozen=True, gc=False):
    """A stored body with ``text`` in place of its bytes from ``start`` to ``stop``."""

    location: Location
    start: int
    stop: int
    text: bytes

    def __len__(self) -> int:
        return self.location.length + self.start - self.stop + len(self.text)


Piece = bytes | memoryview | Edited
"""A part of a reply."""

Outbound = Piece | Slice
"""What is sent straight to a socket: an ``Edited`` piece with a comma after it, everything else unchanged."""


class GroupBodies(msgspec.Struct, frozen=True, gc=False):
    """The bodies in one segment of the samples that name one group, and of their parts."""

    run_id: str
    group_id: str
    num_bytes: int
    part_bytes: int
    """Bytes of parts and notes among them."""
    newest_at_s: float
    """Wall-clock seconds at which the last of them arrived."""


class Segment(msgspec.Struct, frozen=True):
    """A closed part of the store; it can only be removed as a whole."""

    number: int
    num_bytes: int
    groups: Sequence[GroupBodies]


class StoreStats(msgspec.Struct):
    """Sizes of the store, and the faults it found."""

    num_bytes: int = 0
    num_segments: int = 0
    num_quarantined: int = 0
    """Corrupt records set aside since the store was opened."""
    num_torn_bytes: int = 0
    """Bytes of an unfinished last write that were cut off when the store was opened."""
    location: str = ""
    takes_writes: bool = True
    """False after a failed append, until ``recover``."""


class Removals:
    """Segments whose removal is in progress, each with the journal's generation at its start."""

    def __init__(self) -> None:
        self._generations: dict[int, int] = {}
        self._is_empty = Event()
        self._is_empty.set()

    def __contains__(self, segment: int) -> bool:
        return segment in self._generations

    def generation(self, segment: int) -> int:
        """The generation in which the removal began. Raises ``KeyError`` if it did not."""
        return self._generations[segment]

    def begin(self, segment: int, generation: int) -> None:
        """Record that the removal of a segment begins."""
        self._generations[segment] = generation
        self._is_empty.clear()

    def end(self, segment: int) -> None:
        """Record that the removal has ended, or was cancelled."""
        self._generations.pop(segment, None)
        if not self._generations:
            self._is_empty.set()

    async def wait_until_empty(self) -> None:
        """Wait until no removal is in progress."""
        await self._is_empty.wait()


class Store(ABC):
    """Durable rows and bodies, in one order.

    - **Atomic and in order.** The rows and the body of one ``append`` survive together or not at all, and never
      without every earlier one.
    - **Durable.** The future completes only after the disk has confirmed. A later ``kill -9`` or power cut loses
      nothing.
    - **Failure stops everything.** When an append fails, it and all later ones raise ``StorageFailed``, and none of
      them is stored, until ``recover`` succeeds. The caller then reloads its state, as after a crash.
    - **Whole values.** A row replaces the row of the same key: run and start (``run_id``), group (``run_id,
      group_id``), sample (``run_id, group_id, uid``), batch (``run_id, batch_id``), checkpoint (``run_id, step``). A
      ``ColumnsRow`` replaces all samples of its group whose bodies are in its segment.
      A tick replaces the run's ``active_s``; a run or sample row can only raise it.
    - A member's sample row opens its group if that has no row yet (state open, ``opened_s`` = the sample's
      ``at_s``).

    Appends are called from the event loop's thread and return at once. Reads and queries are coroutines that do not
    block the loop; they see every successful append that was called before them.
    """

    _generation = 0

    def __init__(self) -> None:
        self._removals = Removals()

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open, repair what a crash left, and bring the index up to date. Raises ``StorageFailed``."""

    @abstractmethod
    async def __aexit__(self, *_: object) -> None:
        """Write everything queued and close."""

    @abstractmethod
    def submit(self, rows: Sequence[Row], body: bytes | memoryview | None, done: Done) -> None:
        """Queue one atomic entry, with the current state of the rows.

        At most one of ``rows`` is a sample row; ``body`` is then its body, which must not change until ``done`` was
        called. That happens in the loop's thread, in order of the appends. Raises ``InvalidInput`` for an epoch or a
        slot beyond 64 bits, and ``EntryTooLarge``; then nothing was queued, and other appends are unaffected.
        """

    def append(self, rows: Sequence[Row], body: bytes | memoryview | None = None) -> "Future[Location | None]":
        """Call ``submit`` and return a future for the body's location. Cancelling it does not undo the append."""
        future: Future[Location | None] = get_running_loop().create_future()
        self.submit(rows, body, partial(finish, future))
        return future

    @abstractmethod
    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        """Return the bodies at ``locations``, in order.

        Raises ``StorageFailed`` if one cannot be read, ``BodyUnreadable`` if one is missing or damaged. Everything
        else that reads does the same, including slices and parts of replies.
        """

    async def prove(self, locations: Sequence[Location]) -> None:
        """Raise what ``read`` would raise, without returning the bodies."""
        await self.read(locations)

    async def read_slices(self, slices: Sequence[Slice]) -> list[bytes]:
        """Return parts of bodies, in order. Raises ``StorageFailed`` if one cannot be read."""
        # Reads whole bodies: only a store with files can read less.
        bodies = await self.read([each.location for each in slices])
        return [body[each.start : each.stop] for each, body in zip(slices, bodies, strict=True)]

    async def gather(self, pieces: Sequence[Piece]) -> bytes | bytearray:
        """Join ``pieces``, with a comma after each. Raises ``StorageFailed`` as ``read`` does."""
        bodies = iter(await self.read([piece.location for piece in pieces if isinstance(piece, Edited)]))
        made = (_edit(next(bodies), piece) if isinstance(piece, Edited) else piece for piece in pieces)
        return b"".join(part for piece in made for part in (piece, b","))

    async def send(self, pieces: Sequence[Outbound], connection: socket) -> bool:  # noqa: ARG002 - the default cannot
        """Send ``pieces`` over a non-blocking socket; False if this store cannot do so itself.

        Raises ``StorageFailed`` for an unreadable body, and ``ConnectionError`` when the client has disconnected.
        Part of the bytes may have been sent then.
        """
        return False

    @abstractmethod
    async def recover(self) -> None:
        """Recover from a failed append: cut off unconfirmed data, and check that the disk accepts writes.

        Raises ``StorageFailed`` while it does not.
        """

    @property
    def is_on_reserve(self) -> bool:
        """Whether the disk is full, so that only entries without bodies are stored, in the reserve."""
        return False

    def check_room(self) -> None:
        """Raise ``StorageFailed`` while the store ``is_on_reserve``, for callers that would store something new."""
        if self.is_on_reserve:
            reason = "stored samples can be read and acknowledged, but nothing new is accepted"
            hint = "free space on the disk of the data directory; writing then resumes by itself"
            raise StorageFailed(reason, what="the disk is full", hint=hint)

    @abstractmethod
    async def load_runs(self) -> list[RunRow]:
        """All runs, oldest first, with their last recorded ``active_s``."""

    @abstractmethod
    async def load_start(self, run_id: str) -> StartRow | None:
        """Parameters of the run's last start; None if their record is damaged."""

    @abstractmethod
    async def load_groups(self, run_id: str) -> list[GroupRow]:
        """All groups of the run, in the order in which they opened.

        Counts of open groups may be 0: count the samples.
        """

    @abstractmethod
    async def load_samples(self, run_id: str) -> list[StoredSample]:
        """Member samples of the run's open, ready and leased groups, and their parts, in order of arrival."""

    @abstractmethod
    async def load_batches(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[BatchRow]:
        """Batches of the run after number ``after``, ordered by number."""

    @abstractmethod
    async def find_batches(self, run_id: str, batch_ids: Sequence[str]) -> list[BatchRow]:
        """Those of these batches that exist."""

    @abstractmethod
    async def load_checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """All checkpoints of the run, including forgotten ones, by step."""

    @abstractmethod
    async def uids_by_group(self, run_id: str, limit: int | None = None) -> dict[str, list[str]] | None:
        """Uids of the run's samples, not of parts, by group; None if there are more than about ``limit``."""

    @abstractmethod
    async def catch_up(self) -> None:
        """Make ``find`` see every append called before. Raises ``StorageFailed``."""

    @abstractmethod
    async def find(
        self, run_id: str, group_ids: Sequence[str], instance_ids: Sequence[InstanceId] = (), *, has_uids: bool = True
    ) -> list[FoundGroup]:
        """These groups, whether they exist or not, and the ``NEWEST_GROUPS`` of each of these instances.

        Cheap, because it need not see appends called after the last ``catch_up``.
        """

    @abstractmethod
    async def closed_groups(self, run_id: str, after: int) -> list[GroupRow]:
        """Closed groups of the run with a ``closed_seq`` above ``after``, in that order."""

    @abstractmethod
    async def groups(
        self, run_id: str, *, state: str | None = None, after: str = "", limit: int = 100, newest: bool = False
    ) -> list[GroupRow]:
        """A page of the run's groups beyond the group ``after``, in opening order or ``newest`` first."""

    async def samples(self, run_id: str, group_id: str) -> list[StoredSample]:
        """All samples that name the group, with late and surplus ones, parts and notes, in order of arrival."""
        return (await self.samples_of(run_id, [group_id]))[group_id]

    @abstractmethod
    async def samples_of(self, run_id: str, group_ids: Sequence[str]) -> dict[str, list[StoredSample]]:
        """``samples`` for many groups at once, by group; the list is empty if no sample names the group."""

    @abstractmethod
    async def notes(self, run_id: str, prefix: str, since_s: float) -> list[StoredSample]:
        """Notes of the run's samples whose uid begins with ``prefix``, in any order.

        Those that arrived before ``since_s`` may be left out.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Sizes and faults, without disk access."""

    # --- removing whole segments, by one caller at a time

    async def remove_run(self, run_id: str) -> None:
        """Delete all of a run except its bodies, which are removed with their segments. Raises ``StorageFailed``.

        Nothing of the run may be appended afterwards.
        """
        row = RunRow(run_id=run_id, name="", task_type="", state=REMOVED, created_at_s=0.0, active_s=0.0, document={})
        await self.append([row])

    @abstractmethod
    async def has_bodies(self, run_id: str) -> bool:
        """Whether any body of the run still exists."""

    @abstractmethod
    async def segments(self) -> list[Segment]:
        """All segments except the one being written to, oldest first."""

    @abstractmethod
    async def num_row_bytes(self, segment: int) -> int:
        """Approximate number of bytes that ``clear`` rewrites, besides the bodies of moved groups."""

    def holds(self, location: Location) -> bool:
        """Whether the body exists and its segment is not about to be removed."""
        return not self.has_removed(location) and location.segment not in self._removals

    @abstractmethod
    def has_removed(self, location: Location) -> bool:
        """Whether the segment of the body has been removed."""

    async def wait_for_removals(self) -> None:
        """Wait until no removal is in progress: bodies then stay where they are, or are removed."""
        await self._removals.wait_until_empty()

    def begin_removal(self, segment: int) -> None:
        """Announce the removal of a segment: from now on ``holds`` is false for everything in it."""
        self._removals.begin(segment, self._generation)

    def cancel_removal(self, segment: int) -> None:
        """Undo ``begin_removal``, unless the segment has been removed."""
        self._removals.end(segment)

    @abstractmethod
    async def clear(
        self, segment: int, moved: Collection[tuple[str, str]], bare: Collection[tuple[str, str]] = ()
    ) -> None:
        """Append again all information that only this segment has, and wait for the disk.

        For groups in ``moved`` (run and group) this includes the bodies, which get new locations; without their parts
        if they are also in ``bare``. For all other samples everything except the body stays known after the removal.
        Raises ``StorageFailed``; then nothing is lost, and the call can be repeated.
        """

    @abstractmethod
    async def remove(self, segment: int) -> None:
        """Remove a segment after ``begin_removal`` and ``clear``, once the reads in progress have ended.

        Raises ``StorageFailed``; the segment may then still exist, or be removed already.
        """


def stretches(items: Sequence[T], num_bytes: Callable[[T], int], limit: int) -> Iterator[tuple[Sequence[T], int]]:
    """Split ``items`` into parts of up to ``limit`` bytes, each with its size; a longer item is alone in its part."""
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
    """Number of bytes sent for a piece."""
    return len(piece) + isinstance(piece, Edited)


def _edit(body: bytes, piece: Edited) -> bytes:
    return b"".join((body[: piece.start], piece.text, body[piece.stop :]))
