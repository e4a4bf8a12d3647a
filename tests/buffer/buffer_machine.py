"""A buffer with one run that hypothesis drives: in memory, and on a disk whose copies are what a crash leaves."""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from forebay.buffer.buffer import LiveRun
from forebay.buffer.store.abc import Store
from forebay.buffer.store.journal import JournalStore
from forebay.buffer.store.memory import MemoryStore
from forebay.core.clock import ManualClock
from tests.buffer.buffer_kit import open_buffer

ResultT = TypeVar("ResultT")


class BufferMachine(RuleBasedStateMachine):
    """The buffer; a subclass has the rules, and adds ``run-1``."""

    options: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.stack = AsyncExitStack()
        self.store = self.make_store()

    def make_store(self) -> Store:
        return MemoryStore()

    def crashed_store(self) -> Store:
        """What another process would find after ``kill -9``."""
        return self.store

    def do(self, work: Awaitable[ResultT]) -> ResultT:
        async def bounded() -> ResultT:
            async with asyncio.timeout(20):
                return await work

        return self.loop.run_until_complete(bounded())

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a function that needs the event loop."""

        async def called() -> None:
            function(*arguments)

        self.do(called())

    @property
    def entry(self) -> LiveRun:
        return self.buffer.get("run-1")

    def open(self, store: Store) -> None:
        self.store = store
        self.buffer = self.do(self.stack.enter_async_context(open_buffer(store, self.clock, **self.options)))

    def open_again(self, store: Store) -> None:
        self.do(self.stack.aclose())
        self.open(store)

    def teardown(self) -> None:
        self.do(self.stack.aclose())
        self.loop.close()


class OnDisk(BufferMachine):
    """The same on a disk. A crash is what a copy of the directory shows while the other still runs."""

    def make_store(self) -> Store:
        self.folder = tempfile.TemporaryDirectory()
        self.num_copies = 0
        return self.open_journal()

    def open_journal(self) -> Store:
        return JournalStore(self.path)

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / str(self.num_copies)

    def crashed_store(self) -> Store:
        self.do(self.store.load_runs())  # acks and ends of replies are not waited for: let the disk have them
        source = self.path
        self.num_copies += 1
        shutil.copytree(source, self.path)
        return self.open_journal()

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()
