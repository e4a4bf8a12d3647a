"""The queue of samples on their way to the buffer."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from forebay.client.errors import SamplesRefused, WriterClosed
from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.parts import NamedPart

Sample: TypeAlias = dict[str, Any]
"""A sample to write, with the fields of a write over HTTP."""
NEVER_S = 3_600.0
MOST_SAMPLES = 10_000
"""Samples that a server accepts in one write, with the default ``max_batch_samples``."""
SHARED_FACTOR = 4
"""A batch of samples that share parts may have this many times ``max_bytes``."""


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """When a writer sends a batch, and how much may be queued before ``write`` waits."""

    max_samples: int = 64
    """Number of samples at which a batch is sent."""
    max_bytes: int = 8 << 20
    """Bytes, before compression, at which a batch is sent."""
    max_age_s: float = 0.2
    """Longest time that the oldest sample of a batch waits for others, in seconds."""
    max_waiting: int = 1_024
    """Number of unacknowledged samples at which ``write`` waits."""
    max_waiting_bytes: int = 64 << 20
    """Bytes of unacknowledged samples at which ``write`` waits."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0.0 if name == "max_age_s" else 1
            if not value >= least:  # with a limit of 0, a writer would wait for ever
                raise InvalidInput(f"{name} must be at least {least} (got {value})", field=name)
        if self.max_samples > MOST_SAMPLES:
            hint = "a server accepts no more in one write"
            raise InvalidInput(f"max_samples must be at most {MOST_SAMPLES} (got {self.max_samples})", hint=hint)


Limits = WriteLimits
"""The name of ``WriteLimits`` in ``forebay.client``."""


@dataclass(frozen=True, slots=True)
class QueuedSample:
    """A sample and its encoded form, with its parts by digest."""

    sample: Sample
    body: bytes
    put_s: float = 0.0
    parts: Mapping[str, NamedPart] = field(default_factory=dict)
    num_bytes: int = 0
    """Bytes of the body, and of parts that the sample before it does not have."""


class Outbox:
    """The queue between the callers of ``write`` and the flow that sends. Thread-safe.

    ``changed`` is called when there may be room again, or when nothing is left to wait for.
    """

    def __init__(self, limits: WriteLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[QueuedSample] = deque()
        self._waiting_bytes = 0
        self._sending: list[QueuedSample] = []
        self._sending_bytes = 0
        self._num_urgent = 0
        """Number of queued samples that must be sent without waiting for others: those before a flush."""
        self._refused: list[tuple[Sample, ForebayError]] = []
        self._failure: Exception | None = None
        self._is_closing = False
        self.num_acknowledged = 0
        self.num_refused = 0
        self.changed: Callable[[], None] = lambda: None
        self.wake: Callable[[], None] = lambda: None
        """Called when a batch is due earlier than before."""
        self.on_judged: Callable[[Sample], object] = lambda _: None
        """Called for each sample that the buffer has stored or refused."""

    # --- for the callers of write

    @property
    def has_room(self) -> bool:
        """Whether ``put`` may be called; also True when ``put`` would raise."""
        with self._lock:
            is_full = len(self._waiting) + len(self._sending) >= self._limits.max_waiting
            is_full = is_full or self._waiting_bytes + self._sending_bytes >= self._limits.max_waiting_bytes
            # Samples being sent count as well: they are queued again if the buffer has no room.
            return not is_full or self._failure is not None or self._is_closing

    def put(self, sample: Sample, body: bytes, parts: Mapping[str, NamedPart] | None = None) -> None:
        """Queue a sample.

        Raises ``WriterClosed``, or an error that occurred since the last call; the sample is then not queued.
        """
        self.check()
        with self._lock:
            if self._is_closing:
                raise WriterClosed
            last = self._waiting[-1].parts if self._waiting else {}
            # The same objects as before: parts that two samples share take memory once, as they are counted.
            parts = {digest: last.get(digest, part) for digest, part in (parts or {}).items()}
            size = len(body) + sum(len(part.frame) for digest, part in parts.items() if digest not in last)
            self._waiting.append(QueuedSample(sample, body, self._clock(), parts, size))
            self._waiting_bytes += size
            is_due = len(self._waiting) == 1 or self._is_full_batch()
        if is_due:
            self.wake()

    def check(self) -> None:
        """Raise ``SamplesRefused``, once per sample; or, at every call, the error that ended the writer."""
        with self._lock:
            refused, self._refused = self._refused, []
            failure = self._failure
        if refused:
            raise SamplesRefused(refused)
        if failure is not None:
            raise failure

    def hurry(self) -> None:
        """Send all queued samples without waiting for more."""
        with self._lock:
            self._num_urgent = len(self._waiting)
        self.wake()

    def close(self) -> None:
        """Accept no more samples, and send the queued ones at once."""
        with self._lock:
            self._is_closing = True
        self.hurry()
        self.changed()

    @property
    def is_drained(self) -> bool:
        """Whether nothing is queued or being sent, or the writer has failed."""
        with self._lock:
            return self._failure is not None or not (self._waiting or self._sending)

    @property
    def num_unjudged(self) -> int:
        """Number of samples that the buffer has neither acknowledged nor refused."""
        with self._lock:
            return len(self._waiting) + len(self._sending)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be sent again: the writer failed, or it is closed and empty."""
        with self._lock:
            return self._failure is not None or (self._is_closing and not (self._waiting or self._sending))

    # --- for the flow that sends

    @property
    def is_empty_for_good(self) -> bool:
        """Whether the outbox is closed and nothing waits."""
        with self._lock:
            return self._is_closing and not self._waiting

    @property
    def pause_s(self) -> float:
        """Seconds until the next batch is due."""
        with self._lock:
            if not self._waiting:
                return NEVER_S
            if self._is_closing or self._num_urgent or self._is_full_batch():
                return 0.0
            return max(0.0, self._waiting[0].put_s + self._limits.max_age_s - self._clock())

    def _is_full_batch(self) -> bool:
        return len(self._waiting) >= self._limits.max_samples or self._waiting_bytes >= self._limits.max_bytes

    def take(self) -> list[QueuedSample]:
        """Take the next batch: at least one sample, if any waits. It counts against the limits until it is judged."""
        batch: list[QueuedSample] = []
        size = 0
        with self._lock:
            while self._waiting and len(batch) < self._limits.max_samples:
                size += self._waiting[0].num_bytes
                # Parts that a sample shares with the one before it are sent once if both go together.
                is_shared = batch and batch[-1].parts.keys() & self._waiting[0].parts.keys()
                if batch and size > self._limits.max_bytes * (SHARED_FACTOR if is_shared else 1):
                    break
                batch.append(self._waiting.popleft())
                self._waiting_bytes -= batch[-1].num_bytes
            # Samples written after the flush wait for others again.
            self._num_urgent = max(0, self._num_urgent - len(batch))
            self._sending += batch
            self._sending_bytes += sum(each.num_bytes for each in batch)
        return batch

    def acknowledged(self, sent: Iterable[QueuedSample]) -> None:
        """Note that the buffer has stored these samples."""
        sent = list(sent)
        self.num_acknowledged += self._remove(sent)
        for each in sent:
            self.on_judged(each.sample)

    def replace(self, sent: QueuedSample, sample: Sample, body: bytes) -> QueuedSample:
        """Send ``sample`` in place of a refused one, even when the outbox is closed."""
        other = QueuedSample(sample, body, sent.put_s, num_bytes=len(body))
        with self._lock:
            self._sending.append(other)
        self._remove([sent])  # only now: the outbox must not look drained in between
        return other

    def refused(self, sent: QueuedSample, error: ForebayError, *, is_reported: bool) -> None:
        """Note that the buffer refused this sample. ``check`` raises its error, unless ``is_reported``."""
        if not is_reported:
            with self._lock:
                self._refused.append((sent.sample, error))
        self.num_refused += self._remove([sent])
        self.on_judged(sent.sample)

    def _remove(self, sent: Iterable[QueuedSample]) -> int:
        judged = {id(each) for each in sent}
        with self._lock:
            self._sending = [each for each in self._sending if id(each) not in judged]
            self._sending_bytes = sum(each.num_bytes for each in self._sending)
        self.changed()
        return len(judged)

    def fail(self, error: Exception) -> None:
        """End the writer with ``error``: nothing more is sent, and samples being sent stay unjudged."""
        with self._lock:
            self._failure = error
        self.changed()
