"""The buffer: every run with its groups, over one store. The server, or any other host, holds one."""

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
    """A run and the components that work on it."""

    buffer: RunBuffer
    group_judge: GroupJudge
    delivery: Delivery
    deadlines: Deadlines

    @property
    def run(self) -> Run:
        return self.buffer.run


class Buffer:
    """All runs. Enter it with ``async with``: it opens the store, loads what is stored, and applies deadlines."""

    def __init__(
        self,
        store: Store,
        make_hooks: MakeHooks,
        clock: Clock | None = None,
        tick_s: float | None = 0.2,
        remembered_samples: int = REMEMBERED_SAMPLES,
        make_trace: MakeTrace = no_trace,
    ) -> None:
        """With ``tick_s`` None, the caller calls ``tick``."""
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
        """Number of replays that read a run's bodies, by run id. Their bodies stay, except in removals in progress."""
        self._tasks = TaskSet()
        self._retiring = TaskSet()
        self._advancing: set[str] = set()
        self._awake: dict[str, LiveRun] = {}
        """Runs that a tick processes; an ended run only after a change."""
        self.at_rest: set[str] = set()
        """Runs for ``CodeCopies`` to check: they have had their last tick, or bodies of theirs were removed."""
        self._recovering: asyncio.Task[None] | None = None
        self._healthy = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        async with self._stack:
            # Left in reverse order: tasks end before hooks, and hooks before the store.
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
        """Whether the store accepts samples."""
        return self.takes_changes and not self.store.is_on_reserve

    @property
    def takes_changes(self) -> bool:
        """Whether the store accepts changes other than samples, such as an acknowledgement or a deadline."""
        return self._healthy.is_set()

    def get(self, run_id: str) -> LiveRun:
        """The run with this id. Raises ``RunNotFound``."""
        entry = self._entries.get(run_id)
        if entry is None:
            raise RunNotFound(run_id)
        return entry

    def by_key(self, run_key: str) -> LiveRun:
        """The run that this secret key authorises. Raises ``RunNotFound``, without showing the key."""
        if (run_id := self._by_key.get(run_key)) is None:
            hint = "write to the remote_buffer_url that run_rollout is given"
            raise RunNotFound("", message="no run has this key", hint=hint)
        return self.get(run_id)

    def newest(self, name: str) -> LiveRun | None:
        """The run last started over a slime route under ``name``."""
        run_id = self._newest.get(name)
        return None if run_id is None else self._entries[run_id]

    def make_newest(self, run_id: str) -> None:
        """Make a run that a client attached to the newest run of its name."""
        # Removed and inserted again: the dictionary's order determines which run is the newest.
        self._entries[run_id] = entry = self._entries.pop(run_id)
        self._note_newest(entry.run)

    def _note_newest(self, run: Run) -> None:
        if run.origin == "slime":
            self._newest[run.name] = run.run_id

    async def add(self, run: Run) -> LiveRun:
        """Add a new run and store it. Raises ``StorageFailed``."""
        buffer = await self._make(run, 0.0)
        group_judge = GroupJudge(buffer)
        entry = LiveRun(buffer, group_judge, Delivery(buffer, group_judge), Deadlines(buffer, group_judge))
        self._register(entry)
        try:
            await buffer.save_run()
        except BaseException:  # a run that could not be stored must not exist
            self.forget(run)
            raise
        return entry

    async def update(self, run_id: str, change: Callable[[Run], None]) -> None:
        """Change a run and store it, waiting while the disk is full."""
        while True:
            entry = self.get(run_id)
            change(entry.run)
            try:
                # After a failed write, memory is about to be replaced, and this change with it.
                entry.buffer.check_storage()
                await entry.buffer.save_run()
            except EntryTooLarge:  # retrying cannot help
                raise
            except StorageFailed:
                self._healthy.clear()
                self._recover_soon()
                # The recovery loads the run without this change, so the change is made again.
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
        # The previous run of this name, if any, becomes the newest again.
        self._newest.clear()
        for entry in self.entries:
            self._note_newest(entry.run)
        if (hooks := self._hooks.pop(run.run_id, None)) is not None:
            self._retire(hooks)

    async def replace_hooks(self, run_id: str) -> None:
        """Use the hooks of the run's current generator, whose code must be in place.

        Results of the old hooks for a group count only while its batch is leased.
        """
        async with self.locked(run_id) as buffer:
            # Under the lock, so that the old and the new hooks never judge parts of the same group.
            old, buffer.hooks = buffer.hooks, self._make_hooks(buffer.run)
            self._hooks[run_id] = buffer.hooks
            await buffer.hooks.__aenter__()
            buffer.window.keep_samples = buffer.new_window().keep_samples
        self._retire(old)

    def _retire(self, hooks: HookRunner) -> None:
        """Close hooks that are no longer used. Closing may take seconds, and is awaited only at the end."""
        self._retiring.start(hooks.__aexit__(None, None, None))

    @asynccontextmanager
    async def locked(self, run_id: str) -> AsyncIterator[RunBuffer]:
        """The run with its lock held, even if a recovery replaced it while this waited for the lock."""
        while True:
            buffer = self.get(run_id).buffer
            async with buffer.lock:
                if buffer is self.get(run_id).buffer:
                    yield buffer
                    return

    def end_waits(self) -> None:
        """Answer all requests that wait for groups or room, now and from now on, because the server is about to end."""
        for entry in self.entries:
            entry.buffer.news.close()

    # --- time

    async def tick(self) -> None:
        """Apply due deadlines in every run, except runs where an earlier tick is still doing so."""
        # A slow hook may hold up a run for longer than a tick takes.
        idle = [entry for entry in self._awake.values() if entry.run.run_id not in self._advancing]
        for entry in list(self._awake.values()):  # ended runs too: their batches may still be leased
            expire_leases(entry.delivery.leases)
        for entry in idle:
            if entry.run.has_ended and not entry.delivery.leases.held and not entry.buffer.gone.num_holders:
                del self._awake[entry.run.run_id]  # the call below is its last until something changes
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
            return  # recovery is under way, and the next tick will retry
        except Exception:  # one run's failure must not stop the deadlines of the others
            logger.exception("a deadline of run %s failed", run_id)
        finally:
            self._advancing.discard(run_id)

    async def _keep_time(self, tick_s: float) -> None:
        while True:
            await asyncio.sleep(tick_s)
            self._tasks.start(self.tick())  # not awaited: one run's slow hooks must not delay the others

    # --- loading and recovering

    async def _load(self) -> None:
        """Load every run, then install all of them together, so that no caller sees one half loaded."""
        loaded = await side_by_side(self._loaded, await self.store.load_runs())
        for buffer, windows in sorted(loaded, key=lambda each: each[0].run.started_at_s):
            self._install(buffer, windows)

    async def _loaded(self, row: RunRow) -> tuple[RunBuffer, dict[str, MetaWindow]]:
        old = self._entries.get(row.run_id)
        # Memory may be ahead of the disk, and a recovery must not postpone deadlines.
        counted_s = max(row.active_s, old.buffer.active.now_s() if old else 0.0)
        start = await self.store.load_start(row.run_id)
        run = Run.restore(row, start)
        if old:
            run.samples, run.outcomes, run.rewards = old.run.samples, old.run.outcomes, old.run.rewards
            run.reward_parts = old.run.reward_parts
        buffer = await self._make(run, counted_s, is_start_stored=start is not None)
        return buffer, await load_run(buffer, self.store)

    def _install(self, buffer: RunBuffer, windows: dict[str, MetaWindow]) -> None:
        old = self._entries.pop(buffer.run.run_id, None)
        group_judge = GroupJudge(buffer)
        # Delivery outlives the recovery: it tracks replies being sent, and readers wait in it.
        delivery = old.delivery if old else Delivery(buffer, group_judge)
        delivery.resume_with(buffer, group_judge, windows)
        self._register(LiveRun(buffer, group_judge, delivery, Deadlines(buffer, group_judge)))
        if old is not None:
            old.buffer.has_failed = True
            # Waiters on the old object must look at the new one.
            old.buffer.news.notify()

    def look_after_store(self) -> None:
        """Start a recovery if a write failed that belongs to no run."""
        if not self.store.stats().takes_writes:
            self._recover_soon()

    def _recover_soon(self) -> None:
        self._healthy.clear()
        if self._recovering is None or self._recovering.done():
            self._recovering = self._tasks.start(self._recover())

    async def _recover(self) -> None:
        """Wait until the disk accepts writes, then reload the stored state, as after a crash."""
        while True:
            try:
                await self._reload()
            except StorageFailed as error:
                logger.error("%s; retrying in 1 s", error)
            except Exception:  # without a recovery nothing could be written again
                logger.exception("the stored state cannot be loaded; retrying in 1 s")
            else:
                if not any(entry.buffer.has_failed for entry in self.entries):
                    break
            await asyncio.sleep(1)
        self._healthy.set()
        logger.warning("the journal accepts writes again")

    async def _reload(self) -> None:
        await self.store.recover()
        entries = self.entries
        for entry in entries:
            # From now on no caller may change what is about to be replaced.
            entry.buffer.has_failed = True
        async with AsyncExitStack() as locks:
            # The holder of a lock may wait for a slow hook, whose answer is about a state that is being dropped.
            for entry in entries:
                locks.enter_context(entry.buffer.hooks.refuse(StorageFailed(AHEAD)))
            for entry in entries:
                await locks.enter_async_context(entry.buffer.lock)
            # All locks are held, so no caller sees some runs before the reload and others after it.
            await self._load()

    async def _close_hooks(self) -> None:
        for hooks in self._hooks.values():
            self._retire(hooks)
        await self._retiring.drain()
