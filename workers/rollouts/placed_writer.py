"""The samples of rollouts that ran in workers: the lead says to which slot one goes, and counts what is on its way."""

import asyncio
from collections.abc import Callable

from forebay.client.sample_writer.outbox import Sample
from forebay.client.sample_writer.writer import AsyncWriter
from forebay.core.waiting import Signal
from forebay.workers.rollouts.placed_rollout import PlacedRollout


class PlacedWriter:
    """In place of an ``AsyncWriter``, for a job. ``own`` takes samples that no worker has.

    ``grant`` tells the worker of a rollout to write it. As many as ``max_waiting`` may be on their way.
    """

    def __init__(
        self,
        own: AsyncWriter,
        rollouts: dict[str, PlacedRollout],
        grant: Callable[[PlacedRollout], None],
        max_waiting: int,
    ) -> None:
        self._own, self._rollouts, self._grant, self._max_waiting = own, rollouts, grant, max_waiting
        self._on_way: set[str] = set()
        self._news = Signal()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, sample: Sample) -> None:
        """Of ``JobWriter``, as those below."""
        placed = self._rollouts.get(sample["uid"])
        if placed is None or "messages" in sample:
            await self._own.write(sample)
            return
        while len(self._on_way) >= self._max_waiting:
            await self._news.wait()
        self._on_way.add(placed.uid)
        placed.slot = sample["slot"]
        self._grant(placed)

    async def watch(self) -> None:
        own = asyncio.ensure_future(self._own.watch())
        try:
            await asyncio.wait((own, self._failure), return_when=asyncio.FIRST_COMPLETED)
            for each in (own, self._failure):
                if each.done():
                    each.result()
        finally:
            own.cancel()

    async def close(self) -> None:
        while self._on_way:
            await self._news.wait()
        await self._own.close()

    # --- what workers tell

    def note_judged(self, uid: str) -> None:
        """The sample of a rollout is on the disk, or was refused."""
        self._on_way.discard(uid)
        self._news.notify()

    def fail(self, error: BaseException) -> None:
        """Nothing can be written any more."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # a job that has ended otherwise does not ask for it
