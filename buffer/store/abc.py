"""What a store promises. Every implementation passes the same contract suite (``tests/contracts``)."""

from abc import ABC, abstractmethod
from asyncio import Future
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from forebay.buffer.store.rows import GroupRow, Location, Row, RunRow, StoredSample


class StoreStats(msgspec.Struct):
    """What the store holds and what it found wrong."""

    num_bytes: int = 0
    num_segments: int = 0
    num_quarantined: int = 0
    """Corrupt records set aside since the store was opened."""
    num_torn_bytes: int = 0
    """Bytes of an unfinished last write that were cut at opening."""
    location: str = ""


class Store(ABC):
    """Durable rows and bodies, in one order.

    - **Atomic and in order.** The rows and the body of one ``append`` survive together or not at all, and never
      without every earlier one.
    - **Durable.** The future is done only after the disk has confirmed. ``kill -9`` or a power cut later loses
      nothing.
    - **Failure stops everything.** When an append fails, it and all later ones raise ``StorageFailed``, and none of
      them happened, until ``recover`` succeeds. The caller then loads its state again, as after a crash.
    - **Whole values.** A row replaces the row of the same key: run (``run_id``), group (``run_id, group_id``), sample
      (``run_id, group_id, uid``). A tick replaces the run's ``active_s``, which a run or sample row may also raise,
      never lower.
    - A sample row whose group has no row yet opens it (state open, ``opened_s`` = the sample's ``at_s``), if it is a
      member.

    Appends are called from the event loop's thread and return at once; reads and queries are coroutines that leave the
    loop free and see every append that was called before them and did not fail.
    """

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open, mend what a crash left, and bring the index up to date. Raises ``StorageFailed``."""

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is queued and close."""

    @abstractmethod
    def append(self, rows: Sequence[Row], body: bytes | memoryview | None = None) -> "Future[Location | None]":
        """Queue one atomic entry, with the rows as they are now.

        At most one of ``rows`` is a sample row, and then ``body`` is its body, which must not change until the future
        is done. Raises ``InvalidInput`` for an epoch or a slot beyond 64 bits.

        The future's result is the body's location. A cancelled future does not undo the append.
        """

    @abstractmethod
    async def read(self, locations: Sequence[Location]) -> list[bytes]:
        """The bodies at ``locations``, in that order. Raises ``StorageFailed`` for one that cannot be read."""

    @abstractmethod
    async def recover(self) -> None:
        """After a failed append: cut off what was not confirmed, and check that the disk takes writes again.

        Raises ``StorageFailed`` while it does not.
        """

    @abstractmethod
    async def load_runs(self) -> list[RunRow]:
        """Every run, oldest first, with its last recorded ``active_s``."""

    @abstractmethod
    async def load_groups(self, run_id: str) -> list[GroupRow]:
        """Every group of the run, in the order in which they opened.

        Counts of open groups may be 0: count the samples.
        """

    @abstractmethod
    async def load_samples(self, run_id: str) -> list[StoredSample]:
        """The member samples of the run's open, ready and leased groups, in the order in which they came."""

    @abstractmethod
    async def load_uids(self, run_id: str) -> Iterator[str]:
        """The uid of every sample of the run."""

    @abstractmethod
    async def groups(
        self, run_id: str, *, state: str | None = None, after: str = "", limit: int = 100
    ) -> list[GroupRow]:
        """A page of the run's groups in the order in which they opened: those behind the group ``after``."""

    @abstractmethod
    async def samples(self, run_id: str, group_id: str) -> list[StoredSample]:
        """Every sample that names the group, late and surplus ones included, in the order in which they came."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Sizes and faults, without touching the disk."""
