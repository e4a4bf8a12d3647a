"""The blocking and the awaited sample writer. Both use ``protocol.py``."""

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
    """The common part of both writers."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._outbox = writing.outbox

    @property
    def num_acknowledged(self) -> int:
        """Number of samples stored on the buffer's disk."""
        return self._outbox.num_acknowledged

    @property
    def num_refused(self) -> int:
        """Number of samples that the buffer refused."""
        return self._outbox.num_refused

    def _check_drained(self) -> None:
        """Raise the writer's errors, and ``WriterClosed`` if samples are left."""
        self._outbox.check()
        if num := self._outbox.num_unjudged:
            raise WriterClosed(f"timed out before {num} samples were sent")

    def _hurry(self) -> None:
        # An exception is leaving the block: it should not wait two minutes for an unreachable server.
        self._writing.retry_for_s = min(self._writing.retry_for_s, LEAVING_RETRY_S)

    def _log_unsent(self, error: Exception) -> None:
        logger.error("%d samples may not have been sent: %s", self._outbox.num_unjudged, error)


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
    """Sends samples to a run in batches, and resends each batch until it is acknowledged::

        with SampleWriter("http://127.0.0.1:8889", run_id) as writer:
            for sample in rollouts():
                writer.write(sample)

    With a ``run_id``, ``url`` is the server's address. Without one, it is the private address of a run: the
    ``remote_buffer_url`` passed to ``run_rollout``.

    A background thread sends a batch when it reaches a limit of ``limits``. An acknowledged sample is on the buffer's
    disk. After a lost reply the sample is resent; the buffer recognises it by its ``uid``, which is generated if
    missing. While the buffer has no room, samples are queued here, and at ``limits.max_waiting`` samples ``write``
    waits too. This slows the generator down to the trainer's pace. ``encoding`` compresses bodies; token arrays are
    sent as binary numbers.

    A refused sample is passed to ``on_refused(sample, error)`` in the writer's thread. Without ``on_refused``, the
    next call raises ``SamplesRefused``. Other samples are not affected. If the server is unreachable for
    ``retry_for_s`` seconds, or the run or the token is unknown, every further call raises that error.

    Leaving the ``with`` block sends all queued samples. After an exception it tries for a few seconds only and logs how
    many samples may not have been sent. Thread-safe.
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
        """Queue a sample, once there is room.

        Raises ``TypeError`` if it cannot be encoded, ``WriterClosed``, or the error of an earlier sample. In each case
        this sample was not queued.
        """
        self._wait(lambda: self._outbox.has_room)
        if self._writing.put(sample):
            self._background.wake()

    def flush(self) -> None:
        """Wait until every sample written so far is acknowledged or refused.

        Raises ``SamplesRefused``, ``ServerUnreachable``, or another error of the server.
        """
        self._outbox.hurry()
        self._background.wake()
        self._wait(lambda: self._outbox.is_drained)
        self._outbox.check()

    def close(self) -> None:
        """Send all queued samples, then stop. Raises the errors of ``flush``."""
        self._close(NEVER_S)

    def _close(self, wait_s: float) -> None:
        self._outbox.close()
        self._background.wake()
        try:
            self._wait(lambda: self._outbox.is_drained, wait_s)
            self._check_drained()
        finally:
            self._background.stop()
            self._background.join(LEAVING_RETRY_S)  # before its connections are closed
            self._transport.close()

    def _wait(self, condition: Callable[[], bool], wait_s: float = NEVER_S) -> None:
        with self._changed:
            self._changed.wait_for(condition, min(wait_s, threading.TIMEOUT_MAX))  # a longer wait overflows

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
        except Exception as also:  # noqa: BLE001 - the block's own exception must be raised
            self._log_unsent(also)


class AsyncWriter(_Writer):
    """Sends samples with the protocol ``writing`` over ``transport``, which it does not close, from a task."""

    def __init__(self, transport: AsyncTransport, writing: Writing) -> None:
        super().__init__(writing)
        self._changed = Signal()
        self._outbox.changed = self._changed.notify
        self._transport = transport
        self._background: AsyncBackground | None = None
        """Created with the first sample: a writer may be constructed where no event loop runs."""

    async def write(self, sample: Sample) -> None:
        """Queue a sample, once there is room; see ``SampleWriter.write``."""
        await self._wait(lambda: self._outbox.has_room)
        if self._writing.put(sample):
            self._wake()

    async def flush(self) -> None:
        """Wait until every sample written so far is acknowledged or refused; see ``SampleWriter.flush``."""
        self._outbox.hurry()
        self._wake()
        await self._wait(lambda: self._outbox.is_drained)
        self._outbox.check()

    async def close(self) -> None:
        """Send all queued samples, then stop; see ``SampleWriter.close``."""
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
        """Stop sending, even if samples are queued."""
        if self._background is not None:
            await self._background.stop()

    async def watch(self) -> None:
        """Wait until the writer is closed and all samples are sent. Raises at once an error that ends the writer."""
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
    """``SampleWriter`` for asyncio: awaited methods, entered with ``async with``."""

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
        except Exception as also:  # noqa: BLE001 - the block's own exception must be raised
            self._log_unsent(also)
