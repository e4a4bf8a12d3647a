"""The awaited client of a trainer."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from forebay.client.calls.transport import AsyncBackground, AsyncTransport
from forebay.client.model import (
    Batch,
    BatchLike,
    CheckpointInfo,
    CheckpointResult,
    EnginePause,
    RewindResult,
    RunStats,
    WeightUpdate,
)
from forebay.client.trainer.buffer_client import DEFAULT_URL, LEASE_S, RETRY_FOR_S
from forebay.client.trainer.requests import PAUSE_LIMIT_S, UPDATE_TIMEOUT_S, Reading, Wanted, start_payload
from forebay.core.weight_versions import PauseMode


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

    async def start(
        self,
        task_type: str | None = None,
        group_size: int | None = None,
        input_file: str | Path | None = None,
        **settings: Any,
    ) -> RunStats:
        """Start a run and attach to it; see ``BufferClient.start``."""
        return await self._run(self._reading.start(start_payload(task_type, group_size, input_file, settings)))

    async def attach(self, run_id: str) -> RunStats:
        """Attach to an existing run; see ``BufferClient.attach``."""
        return await self._run(self._reading.attach(run_id))

    async def runs(self, name: str | None = None) -> list[RunStats]:
        """Every run of the server, or every run with this ``name``, oldest first."""
        return await self._run(self._reading.runs(name))

    async def stats(self) -> RunStats:
        """The state and the statistics of the run."""
        return await self._run(self._reading.stats())

    async def stop(self) -> RunStats:
        """Stop the run's process. Its data is kept, and completed groups can still be read."""
        return await self._run(self._reading.stop())

    # --- weights

    async def set_weight_version(self, version: int) -> None:
        """Announce the version of the weights in the engines (0 or more). Staleness is counted from it."""
        await self._run(self._reading.set_weight_version(version))

    async def update_weights(
        self,
        version: int,
        model_path: str | Path,
        mode: PauseMode = "abort",
        *,
        timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> WeightUpdate:
        """Load weights into every engine of the run and announce them; see ``BufferClient.update_weights``."""
        return await self._run(self._reading.update_weights(version, str(model_path), mode, timeout_s))

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

    async def read(
        self,
        num_groups: int | None = None,
        batch_size: int | None = None,
        *,
        wait_s: float | None = None,
        lease_s: float = LEASE_S,
        step: int | None = None,
        max_staleness: int | None = None,
    ) -> Batch | None:
        """Read one batch, or None after ``wait_s`` seconds without one; see ``BufferClient.read``."""
        wanted = Wanted(num_groups, batch_size, lease_s, step, max_staleness)
        return await self._run(self._reading.read(wanted, wait_s))

    async def checkpoint(self, step: int, batches: BatchLike | Iterable[BatchLike] | None = None) -> CheckpointResult:
        """Add batches to the checkpoint of ``step`` and ack them; see ``BufferClient.checkpoint``."""
        return await self._run(self._reading.checkpoint(step, batches))

    async def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints of the run, by step."""
        return await self._run(self._reading.checkpoints())

    async def rewind(self, step: int | None) -> RewindResult:
        """Make groups that are in no checkpoint up to ``step`` ready again; see ``BufferClient.rewind``."""
        return await self._run(self._reading.rewind(step))

    async def ack(self, batch: BatchLike) -> None:
        """Mark a batch as used; see ``BufferClient.ack``."""
        await self._run(self._reading.ack(batch))

    async def release(self, batches: BatchLike | Iterable[BatchLike]) -> None:
        """Release batches: their groups are ready for the next reader. Raises ``BatchAcked``."""
        await self._run(self._reading.release(batches))
