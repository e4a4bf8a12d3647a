"""The writers of generators that run elsewhere. Both say the same (``protocol.py``); one blocks, one is awaited."""

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from forebay.client.calls.transport import AsyncBackground, AsyncTransport, Background, Transport
from forebay.client.errors import WriterClosed
from forebay.client.sample_writer.outbox import Sample, WriteLimits
from forebay.client.sample_writer.protocol import Encoding, OnRefused, Writing
from forebay.client.trainer.buffer_client import RETRY_FOR_S
from forebay.core.waiting import Deadline, Signal

logger = logging.getLogger(__name__)

NEVER_S = 1e9
LEAVING_RETRY_S = 5.0
LEAVING_WAIT_S = 30.0


class _Writer:
    """What both writers have."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._outbox = writing.outbox

    @property
    def num_acknowledged(self) -> int:
        """Samples that are on the buffer's disk."""
        return self._outbox.num_acknowledged

    @property
    def num_refused(self) -> int:
        """Samples that the buffer will not take."""
        return self._outbox.num_refused

    def _check_drained(self) -> None:
        """Raise what went wrong; also if there was no time for all."""
        self._outbox.check()
        if num := self._outbox.num_unjudged:
            raise WriterClosed(f"{num} samples were not sent, as there is no more time")

    def _hurry(self) -> None:
        # An error is on its way through the block: it should not wait two minutes for a server that is gone.
        self._writing.retry_for_s = min(self._writing.retry_for_s, LEAVING_RETRY_S)

    def _log_unsent(self, error: Exception) -> None:
        logger.error("%d samples are not known to be sent: %s", self._outbox.num_unjudged, error)


def _writing(
    run_id: str | None,
    limits: WriteLimits | None,
    encoding: Encoding | None,
    retry_for_s: float,
    on_refused: OnRefused | None,
) -> Writing:
    path = "samples" if run_id is None else f"v1/runs/{run_id}/samples"
    return Writing(path, limits or WriteLimits(), encoding, retry_for_s, on_refused)


class SampleWriter(_Writer):
    """Sends samples to a run, in batches, each until it is acknowledged::

        with SampleWriter("http://127.0.0.1:8889", run_id) as writer:
            for sample in rollouts():
                writer.write(sample)

    ``url`` is the server's with a ``run_id``, or without one the private address of a run, the ``remote_buffer_url``
    that its ``run_rollout`` was given.

    A batch goes out when ``limits`` say so, from a thread of the writer's own. A sample whose write was acknowledged is
    on the buffer's disk. One whose reply was lost is sent again: its ``uid`` (made up if it has none) lets the buffer
    know it. While the buffer has no room, samples wait here, and when ``limits.max_waiting`` do, ``write`` waits as
    well: that slows a generator down to its trainer's pace. Bodies are compressed with ``encoding``; token arrays go as
    binary numbers.

    A sample that the buffer will not take goes to ``on_refused(sample, error)``, called from the writer's thread, or
    without one is raised in ``SamplesRefused`` at the next call; the others go on. Where nobody answers for
    ``retry_for_s`` seconds, or the run or the token is unknown, every further call raises why.

    Leaving the ``with`` block sends all that waits; by an error too, with a few seconds of patience, and then what
    could not be sent is logged. May be used by several threads.
    """

    def __init__(
        self,
        url: str,
        run_id: str | None = None,
        token: str | None = None,
        *,
        limits: WriteLimits | None = None,
        encoding: Encoding | None = None,
        retry_for_s: float = RETRY_FOR_S,
        on_refused: OnRefused | None = None,
    ) -> None:
        super().__init__(_writing(run_id, limits, encoding, retry_for_s, on_refused))
        self._changed = threading.Condition()
        self._outbox.changed = self._notify
        self._transport = Transport(url, token or os.environ.get("FOREBAY_TOKEN"))
        self._background = Background(self._transport, self._writing.run(), "forebay-writer")

    def write(self, sample: Sample) -> None:
        """Take a sample, once there is room.

        Raises ``TypeError`` for what cannot be encoded, ``WriterClosed``, or what went wrong with earlier samples; then
        this one was not taken.
        """
        self._wait(lambda: self._outbox.has_room)
        if self._writing.put(sample):
            self._background.wake()

    def flush(self) -> None:
        """Wait until each sample written so far is acknowledged or refused.

        Raises ``SamplesRefused``, ``ServerUnreachable``, or what else the server said.
        """
        self._outbox.hurry()
        self._background.wake()
        self._wait(lambda: self._outbox.is_drained)
        self._outbox.check()

    def close(self) -> None:
        """Send what waits, and stop. Raises what ``flush`` raises."""
        self._close(NEVER_S)

    def _close(self, wait_s: float) -> None:
        self._outbox.close()
        self._background.wake()
        try:
            self._wait(lambda: self._outbox.is_drained, wait_s)
            self._check_drained()
        finally:
            self._background.stop()
            self._background.join(LEAVING_RETRY_S)  # or it would ask over connections that are closed under it
            self._transport.close()

    def _wait(self, condition: Callable[[], bool], wait_s: float = NEVER_S) -> None:
        with self._changed:
            self._changed.wait_for(condition, min(wait_s, threading.TIMEOUT_MAX))  # more overflows

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._hurry()
        try:
            self._close(LEAVING_WAIT_S)
        except Exception as also:  # noqa: BLE001 - the error that is under way must arrive
            self._log_unsent(also)


class AsyncWriter(_Writer):
    """Sends over ``transport``, which stays open, what ``writing`` says, from a task of its own."""

    def __init__(self, transport: AsyncTransport, writing: Writing) -> None:
        super().__init__(writing)
        self._changed = Signal()
        self._outbox.changed = self._changed.notify
        self._transport = transport
        self._background: AsyncBackground | None = None
        """From the first sample on: a writer may be made where no event loop runs."""

    async def write(self, sample: Sample) -> None:
        """As ``SampleWriter.write``."""
        await self._wait(lambda: self._outbox.has_room)
        if self._writing.put(sample):
            self._wake()

    async def flush(self) -> None:
        """As ``SampleWriter.flush``."""
        self._outbox.hurry()
        self._wake()
        await self._wait(lambda: self._outbox.is_drained)
        self._outbox.check()

    async def close(self) -> None:
        """As ``SampleWriter.close``."""
        await self._close(NEVER_S)

    async def _close(self, wait_s: float) -> None:
        self._outbox.close()
        self._wake()
        try:
            await self._wait(lambda: self._outbox.is_drained, wait_s)
            self._check_drained()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Send nothing more, whatever waits."""
        if self._background is not None:
            await self._background.stop()

    async def watch(self) -> None:
        """Return once it is closed and all was sent. Raises, as soon as it is so, why nothing can be sent any more."""
        await self._wait(lambda: self._outbox.has_ended)
        self._outbox.check()

    def _wake(self) -> None:
        if self._background is None:
            self._background = AsyncBackground(self._transport, self._writing.run(), "forebay-writer")
        self._background.wake()

    async def _wait(self, condition: Callable[[], bool], wait_s: float = NEVER_S) -> None:
        deadline = Deadline(wait_s)
        while not condition() and await deadline.wait(self._changed):
            pass


class AsyncSampleWriter(AsyncWriter):
    """``SampleWriter`` to be awaited: the same methods, entered with ``async with``."""

    def __init__(
        self,
        url: str,
        run_id: str | None = None,
        token: str | None = None,
        *,
        limits: WriteLimits | None = None,
        encoding: Encoding | None = None,
        retry_for_s: float = RETRY_FOR_S,
        on_refused: OnRefused | None = None,
    ) -> None:
        transport = AsyncTransport(url, token or os.environ.get("FOREBAY_TOKEN"))
        super().__init__(transport, _writing(run_id, limits, encoding, retry_for_s, on_refused))

    async def stop(self) -> None:
        await super().stop()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        self._hurry()
        try:
            await self._close(LEAVING_WAIT_S)
        except Exception as also:  # noqa: BLE001 - the error that is under way must arrive
            self._log_unsent(also)
