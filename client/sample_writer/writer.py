"""The blocking and the awaited sample writer. Both use ``protocol.py``."""

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Self, TypeAlias

from forebay.client.calls.async_transport import AsyncBackground, AsyncTransport
from forebay.client.calls.flow import RETRY_FOR_S
from forebay.client.calls.transport import Background, Transport
from forebay.client.errors import WriterClosed
from forebay.client.sample_writer.outbox import Sample, WriteLimits
from forebay.client.sample_writer.protocol import Encoding, OnRefused, Writing
from forebay.core.backoff import Deadline
from forebay.core.waiting import Signal

logger = logging.getLogger(__name__)

NEVER_S = 1e9
LEAVING_RETRY_S = 5.0
LEAVING_WAIT_S = 30.0

Steps: TypeAlias = Iterator[Callable[[], bool]]
"""The steps of a method. Between two of them, the writer waits for the condition that the first one yields."""


class _Writer:
    """The common part of all writers."""

    _wait_s = NEVER_S

    def _begin(self, writing: Writing, notify: Callable[[], None], wake: Callable[[], None]) -> None:
        self._writing, self._outbox = writing, writing.outbox
        self._outbox.changed, self._outbox.wake = notify, wake

    @property
    def num_acknowledged(self) -> int:
        """Number of samples stored on the buffer's disk."""
        return self._outbox.num_acknowledged

    @property
    def num_refused(self) -> int:
        """Number of samples that the buffer refused."""
        return self._outbox.num_refused

    def _flush(self) -> Steps:
        self._outbox.hurry()
        yield lambda: self._outbox.is_drained
        self._outbox.check()

    def _close(self) -> Steps:
        self._outbox.close()
        yield lambda: self._outbox.is_drained
        self._outbox.check()
        if num := self._outbox.num_unjudged:
            raise WriterClosed(f"timed out before {num} samples were sent")

    def _leave(self, error: BaseException | None) -> Steps:
        if error is None:
            yield from self._close()
            return
        # The block's own exception must be raised, and not wait two minutes for an unreachable server.
        self._wait_s = LEAVING_WAIT_S
        self._writing.retry_for_s = min(self._writing.retry_for_s, LEAVING_RETRY_S)
        try:
            yield from self._close()
        except Exception as also:  # noqa: BLE001 - the block's own exception must be raised
            logger.error("%d samples may not have been sent: %s", self._outbox.num_unjudged, also)


class _OwnWriter(_Writer, ABC):
    """The constructor of both public writers."""

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
        path = "samples" if run_id is None else f"v1/runs/{run_id}/samples"
        writing = Writing(path, limits or WriteLimits(), encoding, retry_for_s, on_refused)
        self._connect(url, token or os.environ.get("FOREBAY_TOKEN"), writing)

    @abstractmethod
    def _connect(self, url: str, token: str | None, writing: Writing) -> None:
        """Make the transport and what runs ``writing`` over it."""


class SampleWriter(_OwnWriter):
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

    def _connect(self, url: str, token: str | None, writing: Writing) -> None:
        self._changed = threading.Condition()
        self._transport = Transport(url, token)
        self._background = Background(self._transport, writing.run(), "forebay-writer")
        self._begin(writing, self._notify, self._background.wake)

    def write(self, sample: Sample) -> None:
        """Queue a sample, once there is room.

        Raises ``TypeError`` if it cannot be encoded, ``WriterClosed``, or the error of an earlier sample. In each case
        this sample was not queued.
        """
        self._wait(lambda: self._outbox.has_room)
        self._outbox.put(*self._writing.encoded(sample))

    def flush(self) -> None:
        """Wait until every sample written so far is acknowledged or refused.

        Raises ``SamplesRefused``, ``ServerUnreachable``, or another error of the server.
        """
        self._run(self._flush())

    def close(self) -> None:
        """Send all queued samples, then stop. Raises the errors of ``flush``."""
        self._end(self._close())

    def _end(self, steps: Steps) -> None:
        try:
            self._run(steps)
        finally:
            self._background.stop()
            self._background.join(LEAVING_RETRY_S)  # before its connections are closed
            self._transport.close()

    def _run(self, steps: Steps) -> None:
        for condition in steps:
            self._wait(condition)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(condition, self._wait_s)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._end(self._leave(error))


class AsyncWriter(_Writer):
    """Sends samples with the protocol ``writing`` over ``transport``, which it does not close, from a task."""

    def __init__(self, transport: AsyncTransport, writing: Writing) -> None:
        self._changed = Signal()
        self._begin(writing, self._changed.notify, self._wake)
        self._transport = transport
        self._encoding = asyncio.Lock()
        self._background: AsyncBackground | None = None
        """Created with the first sample: a writer may be constructed where no event loop runs."""

    async def write(self, sample: Sample) -> None:
        """Queue a sample, once there is room; see ``SampleWriter.write``."""
        async with self._encoding:  # one at a time: others wait until it counts against the limits
            await self._wait(lambda: self._outbox.has_room)
            # Hashing large arrays would block the event loop.
            has_arrays, encoded = sample.get("arrays"), self._writing.encoded
            self._outbox.put(*(await asyncio.to_thread(encoded, sample) if has_arrays else encoded(sample)))

    async def flush(self) -> None:
        """Wait until every sample written so far is acknowledged or refused; see ``SampleWriter.flush``."""
        await self._run(self._flush())

    async def close(self) -> None:
        """Send all queued samples, then stop; see ``SampleWriter.close``."""
        await self._end(self._close())

    async def stop(self) -> None:
        """Stop sending, even if samples are queued."""
        if self._background is not None:
            await self._background.stop()

    async def watch(self) -> None:
        """Wait until the writer is closed and all samples are sent. Raises at once an error that ends the writer."""
        await self._wait(lambda: self._outbox.has_ended)
        self._outbox.check()

    async def _end(self, steps: Steps) -> None:
        try:
            await self._run(steps)
        finally:
            await self.stop()

    async def _run(self, steps: Steps) -> None:
        for condition in steps:
            await self._wait(condition)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline(self._wait_s)
        while not condition() and await deadline.wait(self._changed):
            pass

    def _wake(self) -> None:
        if self._background is None:
            self._background = AsyncBackground(self._transport, self._writing.run(), "forebay-writer")
        self._background.wake()


class AsyncSampleWriter(_OwnWriter, AsyncWriter):
    """``SampleWriter`` for asyncio: awaited methods, entered with ``async with``."""

    def _connect(self, url: str, token: str | None, writing: Writing) -> None:
        AsyncWriter.__init__(self, AsyncTransport(url, token), writing)

    async def stop(self) -> None:
        await super().stop()
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._end(self._leave(error))
