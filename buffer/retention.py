"""Removes stored bodies that are no longer needed: whole segments, by checkpoints and by byte budgets."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

import msgspec

from forebay.buffer.buffer import Buffer
from forebay.buffer.groups.sample_group import Sample
from forebay.buffer.retention_rules import (
    FOR_REPLAYS,
    FOR_WANT_OF_ROOM,
    Keep,
    LookedUp,
    ReplayBudget,
    RetentionSnapshot,
    SegmentVerdict,
)
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Segment
from forebay.core.errors import Conflict, StorageFailed
from forebay.core.group import LIVE, GroupState
from forebay.core.records.rows import BatchRow, GroupRow
from forebay.core.tasks import TaskSet

EVERY_S = 60.0
MOVED_SHARE = 4
"""A segment is removed only if at most 1/N of it must be rewritten."""
RELOCATIONS = 3

logger = logging.getLogger(__name__)


class Collection(msgspec.Struct):
    """Result of a collection: what was removed and what is left."""

    num_segments_freed: int = 0
    num_bytes_freed: int = 0
    num_segments: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    """The byte budget; 0 for none."""
    replay_bytes: int = 0
    """Byte budget for bodies that only replays need."""
    num_bytes_over: int = 0
    """Bytes by which the journal exceeds its budget, with nothing left to remove."""
    kept: dict[str, int] = {}
    """Bytes of bodies in closed segments, by the reason for keeping them."""


class Retention:
    """Collects on each checkpoint report, periodically, and on request. Enter it with ``async with``."""

    def __init__(
        self, buffer: Buffer, max_bytes: int = 0, every_s: float | None = EVERY_S, *, replay_bytes: int = 0
    ) -> None:
        """``max_bytes`` 0 means no budget; ``replay_bytes`` of what no checkpoint needs stay for replays.

        With ``every_s`` None, the caller calls ``collect``.
        """
        self.num_bytes_over = 0
        self._buffer = buffer
        self._max_bytes = max_bytes
        self._replays = ReplayBudget(replay_bytes)
        self._every_s = every_s
        self._lock = asyncio.Lock()
        self._asked = asyncio.Event()
        self._tasks = TaskSet()
        self._left: dict[int, list[tuple[str, str]]] = {}
        """Segments whose removal was postponed, and their groups that may still be being sent from there."""

    async def __aenter__(self) -> Self:
        if self._every_s is not None:
            self._tasks.start(self._keep_collecting(self._every_s))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    @property
    def num_replayable_bytes(self) -> int:
        """Bytes of bodies in closed segments that only a replay needs, as of the last collection."""
        return self._replays.num_bytes

    def ask(self) -> None:
        """Request a collection soon, because something may have become removable."""
        self._asked.set()

    async def _keep_collecting(self, every_s: float) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), every_s)
            self._asked.clear()
            if not self._may_find_something():
                continue
            try:
                await self.collect(surveys=False)
            except StorageFailed as error:
                logger.warning("nothing more can be removed now: %s", error)
            except Exception:  # the next attempt may succeed, and nothing else depends on it
                logger.exception("unneeded bodies cannot be removed")

    def _may_find_something(self) -> bool:
        is_over = bool(self._max_bytes) and self._buffer.store.stats().num_bytes > self._max_bytes
        return is_over or bool(self._left) or any(_has_old_checkpoint(e.buffer) for e in self._buffer.entries)

    # --- collecting

    async def collect(self, *, surveys: bool = True) -> Collection:
        """Remove what checkpoints allow, then, oldest first, what the budgets require. Raises ``StorageFailed``.

        Bodies are never removed if they are open, ready, leased or being replayed, or if a rewind to one of the last
        checkpoints may need them.
        Without ``surveys``, ``kept`` is counted only for a journal over its budget.
        """
        # A cancelled caller must not leave a segment half removed.
        return await asyncio.shield(self._tasks.start(self._collect(surveys)))

    async def remove_run(self, run_id: str, remove_files: Callable[[str], Awaitable[None]]) -> None:
        """Remove an ended run, its files first. Bodies are removed once nothing else in their segment is needed.

        Raises ``RunNotFound``, ``Conflict``, ``StorageFailed``; the removal can then be repeated.
        """
        # Under the lock: a collection would rewrite, after the removal, what it looked up before.
        async with self._lock, self._buffer.locked(run_id) as buffer:
            if not buffer.run.has_ended:
                raise Conflict(f"run {run_id} has not ended", hint=f"`forebay stop {run_id}` ends it")
            if self._buffer.sources[run_id]:
                raise Conflict(f"run {run_id} is being replayed", hint="stop its replays, or wait until they end")
            self._check_healthy()
            buffer.has_failed = True  # nothing more of the run is stored
            buffer.news.close()
            await remove_files(run_id)
            try:
                await self._buffer.store.remove_run(run_id)
            finally:
                self._buffer.look_after_store()
            self._buffer.forget(buffer.run)

    async def _collect(self, surveys: bool) -> Collection:
        async with self._lock:
            done = Collection(max_bytes=self._max_bytes, replay_bytes=self._replays.max_bytes)
            failures: list[StorageFailed] = []
            for given_up, is_due in self._steps():
                # Oldest first, and listed again for each step, because the previous step moved bodies.
                for segment in await self._buffer.store.segments():
                    if is_due(segment):
                        await self._try_to_drop(segment, done, failures, given_up)
            # Raised only after all segments were tried.
            if failures:
                raise failures[0]
            done.num_bytes_over = self._excess()
            if surveys or done.num_bytes_over:
                done.kept = await self._survey()
            stats = self._buffer.store.stats()
            done.num_segments, done.num_bytes = stats.num_segments, stats.num_bytes
        self._log(done)
        return done

    def _steps(self) -> list[tuple[frozenset[Keep], Callable[[Segment], object]]]:
        """The steps of a collection: the reasons that are overridden, and the segments that each step examines."""
        buffers, replays = self._buffers(), self._replays
        return [
            # Duplicates and nearly empty segments. This step examines all segments.
            (frozenset(), lambda segment: not replays.knows(segment.number, buffers, self._sources())),
            (FOR_REPLAYS, lambda _: replays.is_exceeded),
            # Only if room is still needed, bodies that might be requested.
            (FOR_REPLAYS, lambda _: self._excess()),
            (FOR_WANT_OF_ROOM, lambda _: self._excess()),
        ]

    def _excess(self) -> int:
        stored = self._buffer.store.stats().num_bytes
        return max(0, stored - self._max_bytes) if self._max_bytes else 0

    async def _survey(self) -> dict[str, int]:
        kept: Counter[str] = Counter()
        for segment in await self._buffer.store.segments():
            with self._nothing_forgotten():
                verdict = self._keeper(await self._find_gone(segment)).judge(segment.groups)
            kept.update({reason.value: num_bytes for reason, num_bytes in verdict.kept.items()})
            await asyncio.sleep(0)  # each segment takes some milliseconds
        return dict(kept)

    def _log(self, done: Collection) -> None:
        if done.num_segments_freed:
            logger.info("removed %d segments, %d bytes", done.num_segments_freed, done.num_bytes_freed)
        if done.num_bytes_over and not self.num_bytes_over:
            kept = ", ".join(f"{reason} {number}" for reason, number in done.kept.items())
            logger.warning(
                "the journal is %d bytes over its budget, and nothing can go; bytes kept: %s", done.num_bytes_over, kept
            )
        self.num_bytes_over = done.num_bytes_over

    # --- one segment

    async def _try_to_drop(
        self, segment: Segment, done: Collection, failures: list[StorageFailed], given_up: frozenset[Keep]
    ) -> None:
        """Drop one segment. An error is noted and must not stop the others."""
        try:
            await self._drop(segment, done, given_up)
        except StorageFailed as error:
            self._check_healthy()
            logger.error("segment %d stays: %s", segment.number, error)
            failures.append(error)

    async def _drop(self, segment: Segment, done: Collection, given_up: frozenset[Keep]) -> None:
        """Remove the segment if that frees enough."""
        with self._nothing_forgotten():
            await self._drop_held(segment, done, given_up)

    @contextmanager
    def _nothing_forgotten(self) -> Iterator[None]:
        # A row evicted after its lookup would seem to have never existed.
        with ExitStack() as held:
            for buffer in self._buffers().values():
                held.enter_context(buffer.gone.nothing_forgotten())
            yield

    async def _drop_held(self, segment: Segment, done: Collection, given_up: frozenset[Keep]) -> None:
        store, before = self._buffer.store, self._buffers()
        gone = await self._find_gone(segment)
        first = self._judge(segment, gone, given_up)
        if not given_up:
            self._replays.note(segment, first, before)
        if not self._is_worth_it(segment, first, 0):
            await asyncio.sleep(0)  # the next segment takes some milliseconds too
            return
        # The cheap check above avoids this index query for most segments.
        num_row_bytes = await store.num_row_bytes(segment.number)
        # Nothing may be awaited between this decision and `begin_removal`: groups that become ready must be noticed.
        self._check_healthy()
        # Judged again, because the query took time.
        buffers, verdict = self._buffers(), self._judge(segment, gone, given_up)
        if any(buffers.get(run_id) is not buffer for run_id, buffer in before.items()):
            return  # a recovery replaced them
        if not self._is_worth_it(segment, verdict, num_row_bytes):
            return
        store.begin_removal(segment.number)
        try:
            is_removed = await self._empty(segment.number, verdict, buffers)
        except Exception:  # not on cancellation: the removal may still be completed then
            store.cancel_removal(segment.number)
            self._buffer.look_after_store()
            raise
        if is_removed:
            self._replays.forget(segment.number)
            self._buffer.at_rest.update(bodies.run_id for bodies in segment.groups)
            done.num_segments_freed += 1
            done.num_bytes_freed += segment.num_bytes
        else:
            store.cancel_removal(segment.number)

    async def _find_gone(self, segment: Segment) -> LookedUp:
        """Look up the rows of a segment's groups, and of their batches, that are not in memory."""
        wanted: dict[str, list[str]] = {}
        for bodies in segment.groups:
            wanted.setdefault(bodies.run_id, []).append(bodies.group_id)
        buffers = self._buffers()
        groups, batches = dict[tuple[str, str], GroupRow](), dict[tuple[str, str], BatchRow]()
        for run_id in wanted.keys() & buffers.keys():
            keys, known, gone = wanted[run_id], buffers[run_id].groups.by_id, buffers[run_id].gone
            rows = await gone.rows_of(keys)
            groups |= {(run_id, key): row for key, row in rows.items()}
            rows |= {key: known[key].row for key in keys if key in known}
            holders = await gone.batch_rows_of(row.batch_id for row in rows.values())
            batches |= {(run_id, key): row for key, row in holders.items()}
        return LookedUp(groups, batches)

    def _keeper(self, gone: LookedUp, given_up: frozenset[Keep] = frozenset()) -> RetentionSnapshot:
        return RetentionSnapshot(self._buffers(), gone, self._sources(), given_up)

    def _judge(self, segment: Segment, gone: LookedUp, given_up: frozenset[Keep]) -> SegmentVerdict:
        # Everything is counted in the step that overrides nothing.
        at_most = segment.num_bytes // MOVED_SHARE if given_up else math.inf
        verdict = self._keeper(gone, given_up).judge(segment.groups, at_most)
        for run_id, group_id in self._left.get(segment.number, ()):
            if self._state(run_id, group_id) is GroupState.LEASED:
                verdict.kept[Keep.LEASED] += 1
        return verdict

    def _is_worth_it(self, segment: Segment, verdict: SegmentVerdict, num_row_bytes: int) -> bool:
        num_moved = verdict.kept.total()
        if verdict.is_fixed or num_moved > segment.num_bytes // MOVED_SHARE:
            return False
        return (num_moved + num_row_bytes) * 2 < segment.num_bytes

    async def _empty(self, number: int, verdict: SegmentVerdict, buffers: Mapping[str, RunBuffer]) -> bool:
        """Rewrite what is kept of a segment and remove it; False if the removal is postponed."""
        store = self._buffer.store
        # Rewriting takes long: a group whose state changes meanwhile may be being sent from the old location.
        states = [self._state(*key) for key in verdict.moved]
        await store.clear(number, set(verdict.moved), verdict.bare)
        await self._relocate(number)
        self._check_healthy()
        is_replaced = any(self._buffers().get(run_id) is not buffer for run_id, buffer in buffers.items())
        if is_replaced or states != [self._state(*key) for key in verdict.moved]:
            # One of the groups may be in a reply that uses the old location of its bodies.
            self._left.setdefault(number, []).extend(verdict.moved)
            return False
        self._left.pop(number, None)
        await store.remove(number)
        return True

    async def _relocate(self, number: int) -> None:
        """Update the locations of samples in memory whose bodies were moved out of the segment."""
        # Repeated, because a recovery meanwhile may load samples with the old location.
        for _ in range(RELOCATIONS):
            stale = {run_id: _in_segment(buffer, number) for run_id, buffer in self._buffers().items()}
            if not any(stale.values()):
                return
            for run_id, groups in stale.items():
                stored = await self._buffer.store.samples_of(run_id, list(groups))
                for group_id, samples in groups.items():
                    places = {each.row.uid: each.location for each in stored[group_id]}
                    for sample in samples:
                        sample.location = places.get(sample.row.uid, sample.location)
        raise StorageFailed("memory still needs bodies in it", what=f"segment {number} cannot be removed")

    # --- state of the buffer

    def _buffers(self) -> dict[str, RunBuffer]:
        return {entry.run.run_id: entry.buffer for entry in self._buffer.entries}

    def _sources(self) -> set[str]:
        return {run_id for run_id, number in self._buffer.sources.items() if number}

    def _state(self, run_id: str, group_id: str) -> GroupState | None:
        group = self._buffer.get(run_id).buffer.groups.by_id.get(group_id)
        return None if group is None else group.state

    def _check_healthy(self) -> None:
        """Raise ``StorageFailed`` while memory is ahead of the disk and may be wrong."""
        if not self._buffer.takes_changes or any(buffer.has_failed for buffer in self._buffers().values()):
            raise StorageFailed("the journal is recovering", what="nothing can be removed", hint="try again later")


def _has_old_checkpoint(buffer: RunBuffer) -> bool:
    return len(buffer.batches.steps) >= buffer.run.settings.keep_checkpoints


def _in_segment(buffer: RunBuffer, number: int) -> dict[str, list[Sample]]:
    """Samples in memory whose bodies are in the segment, by group."""
    found: dict[str, list[Sample]] = {}
    for group in buffer.groups.by_id.values():
        if group.state not in LIVE:
            continue
        samples = [s for s in group.samples if s.location is not None and s.location.segment == number]
        if samples:
            found[group.group_id] = samples
    return found
