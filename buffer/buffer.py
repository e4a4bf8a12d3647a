"""The buffer: every run with its groups, over one store. What the server, and any other host, holds."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from forebay.buffer import deadlines
from forebay.buffer.delivery import Delivery
from forebay.buffer.loading import load_run, members
from forebay.buffer.pipeline import Pipeline
from forebay.buffer.resume import covers, held_instances, reconcile
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.store.abc import Store
from forebay.buffer.store.rows import GroupRow, RunRow
from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import RunNotFound, StorageFailed
from forebay.core.group import GroupState
from forebay.core.ids import InstanceId
from forebay.core.run import Run
from forebay.core.signal import Signal
from forebay.hooks.runner import HookRunner

logger = logging.getLogger(__name__)

MakeHooks = Callable[[Run], HookRunner]


@dataclass(slots=True)
class Entry:
    """A run and what works on it."""

    buffer: RunBuffer
    pipeline: Pipeline
    delivery: Delivery

    @property
    def run(self) -> Run:
        return self.buffer.run


class Buffer:
    """All runs. Enter it with ``async with``: it opens the store, takes over what is stored, and keeps deadlines."""

    def __init__(
        self, store: Store, make_hooks: MakeHooks, clock: Clock | None = None, tick_s: float | None = 0.2
    ) -> None:
        """``tick_s`` None leaves it to the caller to call ``tick``, as tests with a manual clock do."""
        self.store = store
        self._make_hooks = make_hooks
        self._clock = clock or SystemClock()
        self._tick_s = tick_s
        self._entries: dict[str, Entry] = {}
        self._by_key: dict[str, str] = {}
        self._newest: dict[str, str] = {}
        self._hooks: dict[str, HookRunner] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._recovering: asyncio.Task[None] | None = None
        self._healthy = asyncio.Event()
        self.news = Signal()
        """Notified when a run is added or replaced."""

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        async with self._stack:
            await self._stack.enter_async_context(self.store)
            self._stack.push_async_callback(self._close_hooks)
            await self._load()
            self._healthy.set()
            if self._tick_s is not None:
                self._start(self._keep_time(self._tick_s))
            self._stack.push_async_callback(self._stop_tasks)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    # --- runs

    @property
    def entries(self) -> list[Entry]:
        """Every run, oldest first."""
        return list(self._entries.values())

    @property
    def is_healthy(self) -> bool:
        """Whether the store takes writes."""
        return self._healthy.is_set()

    def get(self, run_id: str) -> Entry:
        """The run with this id. Raises ``RunNotFound``."""
        entry = self._entries.get(run_id)
        if entry is None:
            raise RunNotFound(run_id)
        return entry

    def by_key(self, run_key: str) -> Entry:
        """The run that this secret key authorises. Raises ``RunNotFound``, without telling the key."""
        run_id = self._by_key.get(run_key)
        if run_id is None:
            raise RunNotFound("with this key")
        return self.get(run_id)

    def newest(self, name: str) -> Entry | None:
        """The run last started through a slime route under ``name``."""
        run_id = self._newest.get(name)
        return None if run_id is None else self._entries[run_id]

    def make_newest(self, run_id: str) -> None:
        """Let a run that was attached to count as the one last started under its name."""
        self._entries[run_id] = entry = self._entries.pop(run_id)
        self._note_newest(entry.run)

    def _note_newest(self, run: Run) -> None:
        if run.origin == "slime":
            self._newest[run.name] = run.run_id

    async def add(self, run: Run) -> Entry:
        """Take in a new run and store it. Raises ``StorageFailed``."""
        entry = await self._enter(run, 0.0)
        try:
            await entry.buffer.save_run()
        except BaseException:  # a run that is not stored does not exist
            self._entries.pop(run.run_id, None)
            self._by_key.pop(run.run_key, None)
            self._newest.pop(run.name, None)
            raise
        entry.buffer.hooks.notify("run_started", run_id=run.run_id, task_type=run.task_type, name=run.name)
        self.news.notify()
        return entry

    async def update(self, run_id: str, change: Callable[[Run], None]) -> None:
        """Change a run and store it, waiting out a full disk."""
        while True:
            entry = self.get(run_id)
            change(entry.run)
            try:
                entry.buffer.check_storage()
                await entry.buffer.save_run()
            except StorageFailed:
                self._healthy.clear()
                self._recover_soon()
                await self._healthy.wait()
            else:
                return

    async def _enter(self, run: Run, active_s: float) -> Entry:
        hooks = self._hooks.get(run.run_id)
        if hooks is None:
            hooks = self._hooks[run.run_id] = self._make_hooks(run)
            await hooks.__aenter__()
        buffer = RunBuffer(run, self.store, self._clock, hooks, active_s=active_s, on_failure=self._recover_soon)
        pipeline = Pipeline(buffer)
        entry = Entry(buffer, pipeline, Delivery(buffer, pipeline))
        self._entries[run.run_id] = entry
        self._by_key[run.run_key] = run.run_id
        self._note_newest(run)
        return entry

    async def replace_hooks(self, run_id: str) -> None:
        """Use the hooks of the run's present generator, after it was attached to with other code."""
        entry = self.get(run_id)
        async with entry.buffer.lock:
            old = self._hooks.pop(run_id)
            hooks = self._hooks[run_id] = self._make_hooks(entry.run)
            await hooks.__aenter__()
            entry.buffer.hooks = hooks
            for group in entry.buffer.groups.in_state(GroupState.READY, GroupState.OPEN):
                group.staged = None
            await old.__aexit__(None, None, None)

    # --- resuming

    def covers(self, entry: Entry, listed: Sequence[InstanceId]) -> bool:
        """Whether the run knows every id of a trainer's list, as often as it is listed."""
        return covers(entry.buffer.groups, entry.run.start_skip, listed)

    async def reconcile(self, entry: Entry, listed: Sequence[InstanceId]) -> None:
        """Make a run exact with respect to a trainer's list. Raises ``StorageFailed``."""
        buffer = entry.buffer
        async with buffer.lock:
            buffer.check_storage()
            entry.delivery.leases.clear()
            result = reconcile(buffer.groups, entry.run.start_skip, listed)
            now_s = buffer.active.now_s()
            for group in result.ack:
                buffer.groups.move(group, GroupState.ACKED, now_s)
            for group in result.redeliver:
                await self._take_back(entry, group.group_id)
            for group in result.report:
                group.row.is_reported, group.row.batch_id = False, ""
                buffer.groups.unreported[group.group_id] = group
            entry.run.base_skip = result.base_skip
            buffer.groups.adopt(entry.run.settings, result.base_skip)
            entry.run.has_delivered = False
            changed = (*result.ack, *result.redeliver, *result.report)
            await buffer.record(*(group.row for group in changed), buffer.run_row())
        buffer.news.notify()

    async def _take_back(self, entry: Entry, group_id: str) -> None:
        groups = entry.buffer.groups
        group = groups.by_id[group_id]
        if group.state is GroupState.ACKED:
            stored = await self.store.samples(entry.run.run_id, group_id)
            groups.revive(group, members(stored))
        group.row.is_reported, group.row.batch_id = False, ""
        groups.move(group, GroupState.READY, entry.buffer.active.now_s())

    def skip_instance_ids(self, run_id: str) -> list[InstanceId]:
        """What another process of this run must not generate, as a multiset."""
        entry = self.get(run_id)
        return [*entry.run.base_skip, *held_instances(entry.buffer.groups)]

    async def expect_repeats(self, run_id: str) -> None:
        """A generator that sends no slots was restarted: it will make incomplete groups' samples once more."""
        buffer = self.get(run_id).buffer
        changed: list[GroupRow] = []
        for group in buffer.groups.in_state(GroupState.OPEN):
            if group.samples and not buffer.groups.is_full(group):
                group.row.surplus_due = len(group.samples)
                changed.append(group.row)
        if changed:
            await buffer.record(*changed)

    # --- time

    async def tick(self) -> None:
        """Do what is due in every run."""
        for entry in self.entries:
            with contextlib.suppress(StorageFailed):  # recovery is under way, and the next tick finds the same due
                await deadlines.advance(entry.buffer, entry.pipeline)

    async def _keep_time(self, tick_s: float) -> None:
        while True:
            await asyncio.sleep(tick_s)
            try:
                await self.tick()
            except Exception:  # one run's fault must not stop the deadlines of the others
                logger.exception("a deadline could not be kept")

    # --- loading and recovering

    async def _load(self) -> None:
        rows = await self.store.load_runs()
        for row in sorted(rows, key=lambda row: row.document["started_at_s"]):
            old = self._entries.pop(row.run_id, None)
            run = _restore(row)
            counted_s = max(row.active_s, old.buffer.active.now_s() if old else 0.0)
            entry = await self._enter(run, counted_s)
            await load_run(entry.buffer, self.store)
            if old is not None:
                entry.buffer.counts.update(old.buffer.counts)
                old.buffer.news.notify()
        self.news.notify()

    def _recover_soon(self) -> None:
        self._healthy.clear()
        if self._recovering is None or self._recovering.done():
            self._recovering = self._start(self._recover())

    async def _recover(self) -> None:
        """As after a crash: wait until the disk takes writes, then take the stored state for the truth."""
        while True:
            try:
                await self.store.recover()
                break
            except StorageFailed as error:
                logger.error("%s; trying again in 1 s", error)
                await asyncio.sleep(1)
        for entry in self.entries:
            entry.buffer.has_failed = True
        async with AsyncExitStack() as locks:
            for entry in self.entries:
                await locks.enter_async_context(entry.buffer.lock)
            await self._load()
        self._healthy.set()
        logger.warning("the journal takes writes again")

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close_hooks(self) -> None:
        for hooks in self._hooks.values():
            await hooks.__aexit__(None, None, None)


def _restore(row: RunRow) -> Run:
    return Run.restore(row.run_id, row.name, row.task_type, row.state, row.created_at_s, row.document)
