"""Samples on their way to the buffer: what waits, what is due, what became of each."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from forebay.client.errors import SamplesRefused, WriterClosed
from forebay.core.errors import ForebayError, InvalidInput

Sample: TypeAlias = dict[str, Any]
"""What is written: its fields are those of a write over HTTP."""
NEVER_S = 3_600.0
MOST_SAMPLES = 10_000
"""What a server takes of one write, if it has its ``max_batch_samples`` by default."""


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """A batch goes out when it has so many samples or bytes, or is so old; so much may wait before writing blocks."""

    max_samples: int = 64
    """Samples that make a batch full."""
    max_bytes: int = 8 << 20
    """Bytes that do, before compression."""
    max_age_s: float = 0.2
    """Seconds that the oldest sample of a batch waits for others."""
    max_waiting: int = 1_024
    """Samples, not yet acknowledged, at which ``write`` waits."""
    max_waiting_bytes: int = 64 << 20
    """Bytes of them at which it does."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0.0 if name == "max_age_s" else 1
            if not value >= least:  # with nothing allowed, a writer would wait for ever
                raise InvalidInput(f"{name} is at least {least}, not {value}", field=name)
        if self.max_samples > MOST_SAMPLES:
            hint = "a server takes no more in one write"
            raise InvalidInput(f"max_samples is at most {MOST_SAMPLES}, not {self.max_samples}", hint=hint)


@dataclass(frozen=True, slots=True)
class QueuedSample:
    """A sample and the bytes that stand for it."""

    sample: Sample
    body: bytes
    put_s: float = 0.0


class Outbox:
    """The queue between those who write and the flow that sends. Several threads may use it.

    ``changed`` is called when there may be room again, or nothing left to wait for.
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
        """How many of those that wait are not to wait for others: someone flushes."""
        self._refused: list[tuple[Sample, ForebayError]] = []
        self._failure: Exception | None = None
        self._is_closing = False
        self.num_acknowledged = 0
        self.num_refused = 0
        self.changed: Callable[[], None] = lambda: None
        self.on_judged: Callable[[Sample], object] = lambda _: None
        """Called for each sample that the buffer has, or will not take."""

    # --- for those who write

    @property
    def has_room(self) -> bool:
        """Whether ``put`` is welcome; also when it would only raise."""
        with self._lock:
            is_full = len(self._waiting) + len(self._sending) >= self._limits.max_waiting
            is_full = is_full or self._waiting_bytes + self._sending_bytes >= self._limits.max_waiting_bytes
            # What is being sent counts as well: it comes back where the buffer has no room.
            return not is_full or self._failure is not None or self._is_closing

    def put(self, sample: Sample, body: bytes) -> bool:
        """Take a sample; whether a batch is due earlier than before.

        Raises ``WriterClosed``, or what went wrong since the last call; then the sample is not taken.
        """
        self.check()
        with self._lock:
            if self._is_closing:
                raise WriterClosed
            self._waiting.append(QueuedSample(sample, body, self._clock()))
            self._waiting_bytes += len(body)
            return len(self._waiting) == 1 or self._is_full_batch()

    def check(self) -> None:
        """Raise ``SamplesRefused``, once for each sample, or why nothing can be sent any more, at every call."""
        with self._lock:
            refused, self._refused = self._refused, []
            failure = self._failure
        if refused:
            raise SamplesRefused(refused)
        if failure is not None:
            raise failure

    def hurry(self) -> None:
        """Let nothing that waits now wait for others."""
        with self._lock:
            self._num_urgent = len(self._waiting)

    def close(self) -> None:
        """Nothing more is taken; what waits goes out at once."""
        with self._lock:
            self._is_closing, self._num_urgent = True, len(self._waiting)
        self.changed()

    @property
    def is_drained(self) -> bool:
        """Whether nothing is under way, or never will be again."""
        with self._lock:
            return self._failure is not None or not (self._waiting or self._sending)

    @property
    def num_unjudged(self) -> int:
        """Samples of which it is not known whether the buffer has them."""
        with self._lock:
            return len(self._waiting) + len(self._sending)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will ever be under way again: it failed, or it is closed and empty."""
        with self._lock:
            return self._failure is not None or (self._is_closing and not (self._waiting or self._sending))

    # --- for the flow that sends

    @property
    def is_empty_for_good(self) -> bool:
        """Closed, and nothing is left."""
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
        """The next batch: at least one sample, if any waits. It counts as waiting until it is judged."""
        batch: list[QueuedSample] = []
        size = 0
        with self._lock:
            while self._waiting and len(batch) < self._limits.max_samples:
                size += len(self._waiting[0].body)
                if batch and size > self._limits.max_bytes:
                    break
                batch.append(self._waiting.popleft())
                self._waiting_bytes -= len(batch[-1].body)
            # Those that came after the flush wait for others again.
            self._num_urgent = max(0, self._num_urgent - len(batch))
            self._sending += batch
            self._sending_bytes += sum(len(each.body) for each in batch)
        return batch

    def acknowledged(self, sent: Iterable[QueuedSample]) -> None:
        """The buffer has these."""
        sent = list(sent)
        self.num_acknowledged += self._remove(sent)
        for each in sent:
            self.on_judged(each.sample)

    def replace(self, sent: QueuedSample, sample: Sample, body: bytes) -> QueuedSample:
        """``sample`` is under way in place of one that was refused, also when nothing more is taken."""
        other = QueuedSample(sample, body, sent.put_s)
        with self._lock:
            self._sending.append(other)
        self._remove([sent])  # only now: between the two, nobody may find the outbox drained
        return other

    def refused(self, sent: QueuedSample, error: ForebayError, *, is_reported: bool) -> None:
        """The buffer will not take this one; ``is_reported`` if somebody knows already."""
        if not is_reported:
            with self._lock:
                self._refused.append((sent.sample, error))
        self.num_refused += self._remove([sent])
        self.on_judged(sent.sample)

    def _remove(self, sent: Iterable[QueuedSample]) -> int:
        judged = {id(each) for each in sent}
        with self._lock:
            self._sending = [each for each in self._sending if id(each) not in judged]
            self._sending_bytes = sum(len(each.body) for each in self._sending)
        self.changed()
        return len(judged)

    def fail(self, error: Exception) -> None:
        """Nothing can be sent any more. What was under way stays unjudged."""
        with self._lock:
            self._failure = error
        self.changed()
