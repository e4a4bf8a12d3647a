"""Batches that are leased to a client, and requests whose batches may be."""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from secrets import token_hex

from forebay.client.calls.flow import Json
from forebay.client.errors import ClientClosed
from forebay.core.errors import ForebayError, InvalidInput

EXTENSIONS_PER_LEASE = 3
TRIES_PER_EXTENSION = 4
"""Retries within half of the time to the next extension, when the server is unreachable."""
NEVER_S = 3_600.0


@dataclass(slots=True)
class _Held:
    lease_s: float
    due_s: float
    is_acked: bool = False
    """Whether it was acked: it needs no extension, but still belongs to the next checkpoint."""


class UncheckpointedLeases:
    """Batches that were returned to the trainer and are in no checkpoint. Thread-safe.

    ``wake`` is called when an extension becomes due earlier than ``pause_s`` last returned.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._lost: dict[str, ForebayError] = {}
        self._busy: set[str] = set()
        """Batches that a call in progress is about to end."""
        self.wake: Callable[[], None] = lambda: None

    def add(self, batch_id: str, lease_s: float) -> None:
        """Note that a batch was taken, or its lease renewed."""
        with self._lock:
            self._held[batch_id] = _Held(lease_s, self._clock() + lease_s / EXTENSIONS_PER_LEASE)
        self.wake()

    def drop(self, batch_ids: Iterable[str]) -> None:
        """Remove batches that this client released or put into a checkpoint."""
        with self._lock:
            for batch_id in batch_ids:
                self._held.pop(batch_id, None)
                self._lost.pop(batch_id, None)

    def forget(self) -> None:
        """Remove all batches, lost leases included: the run was rewound."""
        with self._lock:
            self._held.clear()
            self._lost.clear()

    def exchange_acked(self, batch_ids: Iterable[str]) -> list[str]:
        """Switch to another run, whose acked batches are ``batch_ids``; return the acked batches of the run before."""
        with self._lock:
            before = list(self._held)
            self._held = {batch_id: _Held(NEVER_S, NEVER_S, is_acked=True) for batch_id in batch_ids}
            return before

    def acked(self, batch_id: str) -> None:
        """Note that a batch was acked; it still belongs to the next checkpoint."""
        with self._lock:
            if batch_id in self._held:
                self._held[batch_id].is_acked = True

    @contextmanager
    def busy(self, batch_ids: Iterable[str]) -> Iterator[None]:
        """Ignore lost leases of these batches while a call ends them."""
        ids = set(batch_ids)
        with self._lock:
            self._busy |= ids
        try:
            yield
        finally:
            with self._lock:
                self._busy -= ids

    @property
    def all_ids(self) -> list[str]:
        """Batches that are in no checkpoint, in the order in which they were read."""
        with self._lock:
            return list(self._held)

    @property
    def leased_ids(self) -> list[str]:
        """Batches that are in no checkpoint and not acked."""
        with self._lock:
            return [batch_id for batch_id, held in self._held.items() if not held.is_acked]

    # --- extending them

    @property
    def pause_s(self) -> float:
        """Seconds until the next lease must be extended."""
        with self._lock:
            due_s = [held.due_s for held in self._held.values() if not held.is_acked]
        return max(0.0, min(due_s) - self._clock()) if due_s else NEVER_S

    def due(self) -> list[tuple[str, float]]:
        """Batches whose leases must be extended now, each with its ``lease_s``."""
        now_s = self._clock()
        with self._lock:
            return [
                (batch_id, held.lease_s)
                for batch_id, held in self._held.items()
                if held.due_s <= now_s and not held.is_acked
            ]

    def extended(self, batch_id: str, *, is_done: bool) -> None:
        """Schedule the next extension: after a third of the lease, or soon if this one failed (``is_done`` False)."""
        with self._lock:
            if held := self._held.get(batch_id):
                pause_s = held.lease_s / EXTENSIONS_PER_LEASE
                held.due_s = self._clock() + (pause_s if is_done else pause_s / (2 * TRIES_PER_EXTENSION))

    def lose(self, batch_id: str, error: ForebayError) -> None:
        """Note that the server no longer leases a batch to this client; ``check`` will raise ``error``."""
        with self._lock:
            if batch_id in self._held and batch_id not in self._busy:
                del self._held[batch_id]
                self._lost[batch_id] = error
            elif batch_id in self._held:  # a call is ending it, perhaps faster than the extension: not a loss
                self._held[batch_id].due_s = self._clock() + self._held[batch_id].lease_s / EXTENSIONS_PER_LEASE

    def check(self) -> None:
        """Raise the error of a lost lease, once per lease."""
        with self._lock:
            if self._lost:  # one per call: the next call raises the next one
                raise self._lost.pop(next(iter(self._lost)))


@dataclass(frozen=True)
class Wanted:
    """The arguments of a read."""

    num_groups: int | None
    batch_size: int | None
    lease_s: float
    step: int | None
    max_staleness: int | None

    def __post_init__(self) -> None:
        if (self.num_groups is None) == (self.batch_size is None):
            raise InvalidInput("give exactly one of num_groups and batch_size", field="num_groups")

    def body(self) -> Json:
        """The body of the request, without the fields that differ between tries."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def next(self) -> "Wanted":
        """The arguments for the next step."""
        return self if self.step is None else replace(self, step=self.step + 1)

    def last(self, num_left: int, *, drop_last: bool) -> "Wanted":
        """The last read of a run that ended with ``num_left`` groups: all of them, unless ``drop_last``."""
        return self if drop_last else replace(self, num_groups=num_left, batch_size=None)


class Reads:
    """Ids of the requests whose batches may be leased without this client knowing. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._broken_off: dict[Hashable, list[str]] = {}
        """Interrupted requests by what was wanted: the next read that wants the same reuses the id."""
        self._has_ended = False

    def begin(self, wanted: Hashable) -> str:
        """The id for a new request. Raises ``ClientClosed``."""
        with self._lock:
            self.check()
            # If two reads for the same batch size were interrupted, they are repeated one by one, the older first.
            waiting = self._broken_off.get(wanted)
            request_id = waiting.pop(0) if waiting else f"read-{token_hex(12)}"
            self._under_way.add(request_id)
            return request_id

    def break_off(self, wanted: Hashable, request_id: str) -> None:
        """Note that no caller waits for the reply any longer."""
        with self._lock:
            self._under_way.discard(request_id)
            self._broken_off.setdefault(wanted, []).append(request_id)

    @contextmanager
    def taking(self, request_id: str) -> Iterator[None]:
        """Take over the batch of a reply inside the block. Raises ``ClientClosed`` if the client was closed before.

        The request then stays in ``open_ids``, as it does if the reply cannot be read.
        """
        # The lock is kept throughout: between the check and the note of the lease, another thread could close.
        with self._lock:
            self.check()
            yield
            self._under_way.discard(request_id)

    def end(self) -> bool:
        """Make no more requests and take no more replies. Returns False if that was already the case."""
        with self._lock:
            is_first, self._has_ended = not self._has_ended, True
            return is_first

    def forget(self) -> None:
        """Drop interrupted requests: the server no longer leases their batches."""
        with self._lock:
            self._broken_off.clear()

    @property
    def open_ids(self) -> set[str]:
        """Ids of requests whose replies were not taken."""
        with self._lock:
            return self._under_way.union(*self._broken_off.values())

    def check(self) -> None:
        """Raise ``ClientClosed`` after ``end``."""
        if self._has_ended:
            raise ClientClosed
