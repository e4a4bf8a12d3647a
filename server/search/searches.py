"""Indexes of what models and tools wrote in runs, built in the background during searches."""

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec

from forebay.buffer.buffer import Buffer
from forebay.buffer.parts import at_rest
from forebay.buffer.store.abc import stretches
from forebay.core.errors import BodyUnreadable, Conflict, ForebayError
from forebay.core.group import GroupState
from forebay.core.records.rows import GroupRow, StoredSample
from forebay.core.tasks import TaskSet
from forebay.server.search.text_index import Found, TextIndex

MOST_BYTES = 128 * 2**20
"""Text that an index holds; its file is about twice as large."""
MAX_INDEXES = 4
IN_USE_S = 30.0
"""Seconds after a search in which its index does not give way to that of another run."""
KEPT_S = 600.0
"""Seconds after the last search at which an index is deleted."""
RETRIED_S = 30.0
SHARE = 0.2
"""Share of the time that building an index may take."""
GROUPS_A_TIME = 10
BYTES_A_TIME = 4 * 2**20
NEW_EVERY_S = 1.0


class RunSearch:
    """The index of one run: first the newest groups, then older ones; of open groups only once they are complete."""

    def __init__(self, buffer: Buffer, run_id: str) -> None:
        self._buffer, self._run_id, self._store = buffer, run_id, buffer.store
        self._index: TextIndex | None = None
        self._using = asyncio.Lock()
        """So that an index never holds more than one of the threads that also read the journal."""
        self._newest = self._oldest = ""
        """The groups up to which the index goes."""
        self._open: dict[str, GroupRow] = {}
        self._has_oldest = False
        self._num_unread = 0
        self._problem = ""
        self.asked_s = time.monotonic()

    async def build(self) -> None:
        """Bring groups into the index until ``KEPT_S`` after the last search."""
        try:
            self._index = TextIndex(MOST_BYTES)
            while time.monotonic() - self.asked_s < KEPT_S:
                rows = await self._next_rows()
                await self._add(self._index, rows)
                if not rows:
                    await asyncio.sleep(NEW_EVERY_S)
        except (ForebayError, OSError, sqlite3.Error) as error:
            self._problem = f"the index cannot be built: {error}"
        finally:
            index, self._index = self._index, None
            if index is not None:
                await asyncio.to_thread(index.close)
        if self._problem:
            await asyncio.sleep(RETRIED_S)

    async def _next_rows(self) -> list[GroupRow]:
        """Groups that are not in the index: those opened since, those open then, or those before them."""
        if self._newest:
            rows = await self._store.groups(self._run_id, after=self._newest, limit=GROUPS_A_TIME)
        else:
            rows = await self._store.groups(self._run_id, newest=True, limit=GROUPS_A_TIME)
            self._has_oldest, self._oldest = len(rows) < GROUPS_A_TIME, rows[-1].group_id if rows else ""
        self._newest = max(rows, key=lambda row: row.number).group_id if rows else self._newest
        self._open |= {row.group_id: row for row in rows}
        rows = [self._open.pop(key) for key in list(self._open) if not self._is_open(key)]
        if not rows and not self._has_oldest and not (self._index and self._index.is_full):
            rows = await self._store.groups(self._run_id, after=self._oldest, newest=True, limit=GROUPS_A_TIME)
            self._has_oldest, self._oldest = not rows, rows[-1].group_id if rows else self._oldest
            self._open |= {row.group_id: row for row in rows if self._is_open(row.group_id)}
        return [row for row in rows if row.group_id not in self._open]

    def _is_open(self, group_id: str) -> bool:
        groups = self._buffer.get(self._run_id).buffer.groups  # of now: a full disk that recovers brings another one
        known = groups.by_id.get(group_id)
        return known is not None and known.row.state is GroupState.OPEN and not groups.is_full(known)

    async def _add(self, index: TextIndex, rows: Sequence[GroupRow]) -> None:
        numbers = {row.group_id: row.number for row in rows}

        async def look_up() -> list[StoredSample]:
            found = await self._store.samples_of(self._run_id, list(numbers))
            return [each for key in numbers for each in found[key] if each.row.outcome in ("member", "failed")]

        found = await at_rest(self._store, look_up)
        for part, _ in stretches(found, lambda each: each.location.length, BYTES_A_TIME):
            began_s = time.monotonic()
            read = [(numbers[each.row.group_id], each.row, await self._body(each)) for each in part]
            async with self._using:
                await asyncio.to_thread(index.add, [each for each in read if each[2]])
            await asyncio.sleep((time.monotonic() - began_s) * (1 / SHARE - 1))

    async def _body(self, sample: StoredSample) -> bytes:
        """The body; b"" if it is removed or damaged."""
        if self._store.holds(sample.location):
            with suppress(BodyUnreadable):
                return (await self._store.read([sample.location]))[0]
        self._num_unread += 1
        return b""

    async def find(self, text: str, instance: str, min_reward: float | None, limit: int) -> dict[str, Any]:
        """What ``TextIndex.find`` finds, and how far the index goes."""
        self.asked_s = time.monotonic()
        found, index = Found(), self._index
        try:
            if index is not None:
                async with self._using:
                    found = await asyncio.to_thread(index.find, text, instance, min_reward, limit)
        except sqlite3.Error as error:  # its folder is full, or it was closed meanwhile
            self._problem = self._problem or f"the index cannot be read: {error}"
        is_full = index is not None and index.is_full
        state = {
            "is_building": not (self._has_oldest or is_full or self._problem),
            "is_full": is_full,
            "num_open_groups": len(self._open),
            "num_unread": self._num_unread,
            "problem": self._problem,
        }
        return {**msgspec.to_builtins(found), **state}


class Searches:
    """The indexes of the runs that were searched last."""

    def __init__(self) -> None:
        self._tasks = TaskSet()
        self._known: dict[str, tuple[RunSearch, asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()

    def of(self, buffer: Buffer, run_id: str) -> RunSearch:
        """The run's index, which may have to be built. Raises ``Conflict`` while others are in use."""
        self._known = {key: each for key, each in self._known.items() if not each[1].done()}
        if run_id not in self._known:
            if len(self._known) >= MAX_INDEXES:
                self._drop_oldest()
            search = RunSearch(buffer, run_id)
            self._known[run_id] = search, self._tasks.start(search.build())
        return self._known[run_id][0]

    def _drop_oldest(self) -> None:
        run_id = min(self._known, key=lambda each: self._known[each][0].asked_s)
        if time.monotonic() - self._known[run_id][0].asked_s < IN_USE_S:
            hint = f"close the search pages of other runs, and try again in {IN_USE_S:g} s"
            raise Conflict(f"{MAX_INDEXES} other runs are being searched", hint=hint)
        self._known.pop(run_id)[1].cancel()
