"""The buffer: every run with its groups, over one store. What the server, and any other host, holds."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

from forebay.buffer.change_records import MakeTrace, no_trace
from forebay.buffer.deadlines import Deadlines, expire_leases
from forebay.buffer.evicted_rows import REMEMBERED_SAMPLES
from forebay.buffer.groups.meta_info import MetaWindow
from forebay.buffer.reads.delivery import Delivery
from forebay.buffer.reads.judging import GroupJudge
from forebay.buffer.restore import load_run, side_by_side
from forebay.buffer.run_buffer import AHEAD, RunBuffer
from forebay.buffer.store.abc import Store
from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import EntryTooLarge, RunNotFound, StorageFailed
from forebay.core.records.rows import RunRow
from forebay.core.run import Run
from forebay.core.tasks import TaskSet
from forebay.hooks.run_hooks import HookRunner

logger = logging.getLogger(__name__)

MakeHooks = Callable[[Run], HookRunner]


@dataclass(slots=True)
class LiveRun:
    """A run and what works on it."""

    buffer: RunBuffer
    group_judge: GroupJudge
    delivery: Delivery
    deadlines: Deadlines

    @property
    def run(self) -> Run:
        return self.buffer.run


class Buffer:
    """All runs. Enter it with ``async with``: it opens the store, takes over what is stored, and keeps deadlines."""

    def __init__(
        self,
        store: Store,
        make_hooks: MakeHooks,
        clock: Clock | None = None,
        tick_s: float | None = 0.2,
        remembered_samples: int = REMEMBERED_SAMPLES,
        make_trace: MakeTrace = no_trace,
    ) -> None:
        """``tick_s`` None leaves it to the caller to call ``tick``."""
        self.store = store
        self._make_hooks, self._make_trace = make_hooks, make_trace
        self._clock = clock or SystemClock()
        self._tick_s = tick_s
        self._remembered_samples = remembered_samples
        self._entries: dict[str, LiveRun] = {}
        self._by_key: dict[str, str] = {}
        self._newest: dict[str, str] = {}
        self._hooks: dict[str, HookRunner] = {}
        self.sources: Counter[str] = Counter()
        """By run id, how many replays read its bodies: they stay, but for removals that have begun (wait for those)."""
        self._tasks = TaskSet()
        self._retiring = TaskSet()
        self._advancing: set[str] = set()
        self._awake: dict[str, LiveRun] = {}
        """The runs that a tick looks at; one that has ended only after a change."""
        self.at_rest: set[str] = set()
        """Runs for ``CodeCopies`` to look at: they have had their last tick, or bodies of theirs were removed."""
        self._recovering: asyncio.Task[None] | None = None
        self._healthy = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        async with self._stack:
            # Left in the opposite order: tasks end before hooks, and hooks before the store.
            await self._stack.enter_async_context(self.store)
            self._stack.push_async_callback(self._close_hooks)
            await self._load()
            self._healthy.set()
            if self._tick_s is not None:
                self._tasks.start(self._keep_time(self._tick_s))
            self._stack.push_async_callback(self._tasks.cancel)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # --- runs

    @property
    def entries(self) -> list[LiveRun]:
        """Every run, oldest first."""
        return list(self._entries.values())

    @property
    def is_healthy(self) -> bool:
        """Whether the store takes samples."""
        return self.takes_changes and not self.store.is_on_reserve

    @property
    def takes_changes(self) -> bool:
        """Whether what is not new is stored: an acknowledgement, a deadline."""
        return self._healthy.is_set()

    def get(self, run_id: str) -> LiveRun:
        """The run with this id. Raises ``RunNotFound``."""
        entry = self._entries.get(run_id)
        if entry is None:
            raise RunNotFound(run_id)
        return entry

    def by_key(self, run_key: str) -> LiveRun:
        """The run that this secret key authorises. Raises ``RunNotFound``, without telling the key."""
        if (run_id := self._by_key.get(run_key)) is None:
            hint = "write to the remote_buffer_url that run_rollout is given"
            raise RunNotFound("", message="no run has this key", hint=hint)
        return self.get(run_id)

    def newest(self, name: str) -> LiveRun | None:
        """The run last started through a slime route under ``name``."""
        run_id = self._newest.get(name)
        return None if run_id is None else self._entries[run_id]

    def make_newest(self, run_id: str) -> None:
        """Let a run that was attached to count as the one last started under its name."""
        # Taken out and put in again: the order of the dictionary says which run is the newest.
        self._entries[run_id] = entry = self._entries.pop(run_id)
        self._note_newest(entry.run)

    def _note_newest(self, run: Run) -> None:
        if run.origin == "slime":
            self._newest[run.name] = run.run_id

    async def add(self, run: Run) -> LiveRun:
        """Take in a new run and store it. Raises ``StorageFailed``."""
        buffer = await self._make(run, 0.0)
        group_judge = GroupJudge(buffer)
        entry = LiveRun(buffer, group_judge, Delivery(buffer, group_judge), Deadlines(buffer, group_judge))
        self._register(entry)
        try:
            await buffer.save_run()
        except BaseException:  # a run that is not stored does not exist
            self.forget(run)
            raise
        return entry

    async def update(self, run_id: str, change: Callable[[Run], None]) -> None:
        """Change a run and store it, waiting out a full disk."""
        while True:
            entry = self.get(run_id)
            change(entry.run)
            try:
                # An earlier write may have failed: then memory is about to be replaced, and this change with it.
                entry.buffer.check_storage()
                await entry.buffer.save_run()
            except EntryTooLarge:  # it would be as large the next time
                raise
            except StorageFailed:
                self._healthy.clear()
                self._recover_soon()
                # The recovery replaces the run object by what the disk has, without this change: it is made once more.
                await self._healthy.wait()
            else:
                return

    async def _make(self, run: Run, active_s: float, *, is_start_stored: bool = False) -> RunBuffer:
        hooks = self._hooks.get(run.run_id)
        if hooks is None:
            hooks = self._hooks[run.run_id] = self._make_hooks(run)
            await hooks.__aenter__()
        given = (run, self.store, self._clock, hooks, self._remembered_samples, self._make_trace(run))
        called = (self._recover_soon, partial(self._wake, run.run_id))
        return RunBuffer(*given, *called, active_s=active_s, is_start_stored=is_start_stored)

    def _wake(self, run_id: str) -> None:
        if (entry := self._entries.get(run_id)) is not None:
            self._awake[run_id] = entry

    def _register(self, entry: LiveRun) -> None:
        run = entry.run
        self._entries[run.run_id] = self._awake[run.run_id] = entry
        self._by_key[run.run_key] = run.run_id
        self._note_newest(run)

    def forget(self, run: Run) -> None:
        """Drop a run that is not stored."""
        self._entries.pop(run.run_id, None)
        self._awake.pop(run.run_id, None)
        self.at_rest.discard(run.run_id)
        self._by_key.pop(run.run_key, None)
        # The run before it, if there is one, is the newest of its name again.
        self._newest.clear()
        for entry in self.entries:
            self._note_newest(entry.run)
        if (hooks := self._hooks.pop(run.run_id, None)) is not None:
            self._retire(hooks)

    async def replace_hooks(self, run_id: str) -> None:
        """Use the hooks of the run's present generator, whose code must be in place.

        What the old ones made of a group counts only as long as its batch is with a trainer.
        """
        async with self.locked(run_id) as buffer:
            # Under the lock, so that no group is judged half by the old hooks and half by the new.
            old, buffer.hooks = buffer.hooks, self._make_hooks(buffer.run)
            self._hooks[run_id] = buffer.hooks
            await buffer.hooks.__aenter__()
            buffer.window.keep_samples = buffer.new_window().keep_samples
        self._retire(old)

    def _retire(self, hooks: HookRunner) -> None:
        """Close hooks that nobody asks any more. They may take seconds, and are waited for only at the very end."""
        self._retiring.start(hooks.__aexit__(None, None, None))

    @asynccontextmanager
    async def locked(self, run_id: str) -> AsyncIterator[RunBuffer]:
        """The run with its lock held, also if a recovery replaced it while the lock was waited for."""
        while True:
            buffer = self.get(run_id).buffer
            async with buffer.lock:
                if buffer is self.get(run_id).buffer:
                    yield buffer
                    return

    def end_waits(self) -> None:
        """Answer those who wait for groups or room, now and from now on: the server is about to end."""
        for entry in self.entries:
            entry.buffer.news.close()

    # --- time

    async def tick(self) -> None:
        """Do what is due in every run; those in which it is still being done since an earlier tick are left out."""
        # A slow hook may hold up a run for longer than a tick takes.
        idle = [entry for entry in self._awake.values() if entry.run.run_id not in self._advancing]
        for entry in list(self._awake.values()):  # also ended ones: what they left can still be with a trainer
            expire_leases(entry.delivery.leases)
        for entry in idle:
            if entry.run.has_ended and not entry.delivery.leases.held and not entry.buffer.gone.num_holders:
                del self._awake[entry.run.run_id]  # what is done below is the last of it until something changes
                self.at_rest.add(entry.run.run_id)
        await asyncio.gather(*(self._advance(entry) for entry in idle))

    async def _advance(self, entry: LiveRun) -> None:
        run_id = entry.run.run_id
        self._advancing.add(run_id)
        try:
            await entry.deadlines.advance()
            if not entry.buffer.has_failed:
                await entry.buffer.gone.forget()
        except StorageFailed:
            return  # recovery is under way, and the next tick finds the same due
        except Exception:  # one run's fault must not stop the deadlines of the others
            logger.exception("a deadline of run %s could not be kept", run_id)
        finally:
            self._advancing.discard(run_id)

    async def _keep_time(self, tick_s: float) -> None:
        while True:
            await asyncio.sleep(tick_s)
            self._tasks.start(self.tick())  # not waited for: one run's slow hooks must not hold up the others

    # --- loading and recovering

    async def _load(self) -> None:
        """Load every run, and only then put them all in place: nobody must meet one that is half loaded."""
        loaded = await side_by_side(self._loaded, await self.store.load_runs())
        for buffer, windows in sorted(loaded, key=lambda each: each[0].run.started_at_s):
            self._install(buffer, windows)

    async def _loaded(self, row: RunRow) -> tuple[RunBuffer, dict[str, MetaWindow]]:
        old = self._entries.get(row.run_id)
        # Memory has counted further than the disk may know, and no deadline is put off by a recovery.
        counted_s = max(row.active_s, old.buffer.active.now_s() if old else 0.0)
        start = await self.store.load_start(row.run_id)
        run = Run.restore(row, start)
        if old:
            run.samples, run.outcomes, run.rewards = old.run.samples, old.run.outcomes, old.run.rewards
        buffer = await self._make(run, counted_s, is_start_stored=start is not None)
        return buffer, await load_run(buffer, self.store)

    def _install(self, buffer: RunBuffer, windows: dict[str, MetaWindow]) -> None:
        old = self._entries.pop(buffer.run.run_id, None)
        group_judge = GroupJudge(buffer)
        # Delivery outlives the recovery: it knows which replies are on their way, and readers wait in it.
        delivery = old.delivery if old else Delivery(buffer, group_judge)
        delivery.resume_with(buffer, group_judge, windows)
        self._register(LiveRun(buffer, group_judge, delivery, Deadlines(buffer, group_judge)))
        if old is not None:
            old.buffer.has_failed = True
            # Whoever waits by the old object must look at the new one.
            old.buffer.news.notify()

    def look_after_store(self) -> None:
        """Begin to recover if a write failed that is no run's own."""
        if not self.store.stats().takes_writes:
            self._recover_soon()

    def _recover_soon(self) -> None:
        self._healthy.clear()
        if self._recovering is None or self._recovering.done():
            self._recovering = self._tasks.start(self._recover())

    async def _recover(self) -> None:
        """As after a crash: wait until the disk takes writes, then take the stored state for the truth."""
        while True:
            try:
                await self._reload()
            except StorageFailed as error:
                logger.error("%s; trying again in 1 s", error)
            except Exception:  # without a recovery nothing is ever written again
                logger.exception("the stored state cannot be loaded; trying again in 1 s")
            else:
                if not any(entry.buffer.has_failed for entry in self.entries):
                    break
            await asyncio.sleep(1)
        self._healthy.set()
        logger.warning("the journal takes writes again")

    async def _reload(self) -> None:
        await self.store.recover()
        entries = self.entries
        for entry in entries:
            # From now on nobody may change what is about to be replaced.
            entry.buffer.has_failed = True
        async with AsyncExitStack() as locks:
            # Whoever has a lock may wait for a slow hook, whose answer is about a state that is being dropped.
            for entry in entries:
                locks.enter_context(entry.buffer.hooks.refuse(StorageFailed(AHEAD)))
            for entry in entries:
                await locks.enter_async_context(entry.buffer.lock)
            # All locks are held: nobody sees some runs as they were, and others as they are.
            await self._load()

    async def _close_hooks(self) -> None:
        for hooks in self._hooks.values():
            self._retire(hooks)
        await self._retiring.drain()
