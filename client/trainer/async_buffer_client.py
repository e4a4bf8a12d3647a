"""The awaited client of a trainer."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from forebay.client.calls.async_transport import AsyncBackground, AsyncTransport
from forebay.client.calls.flow import RETRY_FOR_S, Flow
from forebay.client.model import Batch, EnginePause
from forebay.client.trainer.buffer_client import DEFAULT_URL, show_as_method
from forebay.client.trainer.leases import Wanted
from forebay.client.trainer.requests import LEASE_S, Reading
from forebay.client.trainer.run_requests import PAUSE_LIMIT_S
from forebay.core.weight_versions import PauseMode

P = ParamSpec("P")
T = TypeVar("T")


def awaited(
    request: Callable[Concatenate[Reading, P], Flow[T]],
) -> Callable[Concatenate["AsyncBufferClient", P], Coroutine[Any, Any, T]]:
    """Make the awaited method that runs ``request``."""

    @wraps(request, assigned=("__name__",))
    async def call(self: "AsyncBufferClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(request(self._reading, *args, **kwargs))

    show_as_method(call, request, "AsyncBufferClient")
    summary = str(request.__doc__).partition("\n")[0].partition(". ")[0].partition("; see ")[0].removesuffix(".")
    call.__doc__ = f"{summary}. See ``BufferClient.{request.__name__}``."
    return call


class AsyncBufferClient:
    """``BufferClient`` for asyncio: awaited methods, entered with ``async with``, iterated with ``async for``.

    A task extends the leases. Cancelling a read loses nothing: the batch it leased goes to the next read, or is
    released when the client closes. Calls that other tasks have in progress at that time raise ``ClientClosed``.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        *,
        retry_for_s: float = RETRY_FOR_S,
        as_tensors: bool = False,
    ) -> None:
        self._transport = AsyncTransport(url, token or os.environ.get("FOREBAY_TOKEN"))
        self._run = self._transport.run
        self._reading = Reading(retry_for_s, as_tensors=as_tensors)
        self._reading.leases.wake = self._keep
        self._keeper: AsyncBackground | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Interrupt calls of other tasks, release what is still leased, and close; see ``BufferClient.close``."""
        if not self._reading.reads.end():
            return
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            await keeper.stop()
        try:
            await self._transport.cut()
            await self._transport.run_last(self._reading.leave())
        finally:
            await self._transport.close()

    def _keep(self) -> None:
        if self._keeper is None:
            self._keeper = AsyncBackground(self._transport, self._reading.keep(), "forebay-leases")
        else:
            self._keeper.wake()

    # --- runs

    @property
    def run_id(self) -> str:
        """The run that this client started or attached to; empty before that."""
        return self._reading.run_id

    start = awaited(Reading.start)
    attach = awaited(Reading.attach)
    runs = awaited(Reading.runs)
    stats = awaited(Reading.stats)
    stop = awaited(Reading.stop)
    evaluate = awaited(Reading.evaluate)

    # --- weights

    set_weight_version = awaited(Reading.set_weight_version)
    update_weights = awaited(Reading.update_weights)

    @asynccontextmanager
    async def paused_engines(
        self, mode: PauseMode = "abort", *, weight_version: int | None = None, limit_s: float = PAUSE_LIMIT_S
    ) -> AsyncIterator[EnginePause]:
        """Pause the engines of the run inside the ``async with`` block; see ``BufferClient.paused_engines``."""
        pause = await self._run(self._reading.pause_engines(mode, limit_s))
        try:
            yield pause
        except BaseException:  # however the block ends, the engines must resume
            # Shielded: a task that was cancelled inside the block may be cancelled a second time.
            await asyncio.shield(self._run(self._reading.continue_engines(None)))
            raise
        await self._run(self._reading.continue_engines(weight_version))

    # --- batches

    def batches(
        self,
        num_groups: int | None = None,
        batch_size: int | None = None,
        *,
        lease_s: float = LEASE_S,
        step: int | None = None,
        max_staleness: int | None = None,
        drop_last: bool = False,
    ) -> AsyncIterator[Batch]:
        """Iterate over batches until the run ends; see ``BufferClient.batches``."""
        return self._iterate(Wanted(num_groups, batch_size, lease_s, step, max_staleness), drop_last=drop_last)

    async def _iterate(self, wanted: Wanted, *, drop_last: bool) -> AsyncIterator[Batch]:
        while batch := await self._run(self._reading.next_batch(wanted, drop_last=drop_last)):
            yield batch
            wanted = wanted.next()

    read = awaited(Reading.read)
    metrics = awaited(Reading.metrics)
    arrays = awaited(Reading.arrays)
    images = awaited(Reading.images)
    annotate = awaited(Reading.annotate)
    checkpoint = awaited(Reading.checkpoint)
    checkpoints = awaited(Reading.checkpoints)
    rewind = awaited(Reading.rewind)
    ack = awaited(Reading.ack)
    release = awaited(Reading.release)
