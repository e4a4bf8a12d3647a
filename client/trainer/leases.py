"""What a client has of the server: batches that are leased to it, and requests whose batches may be."""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex

from forebay.client.errors import ClientClosed
from forebay.core.errors import ForebayError

EXTENSIONS_PER_LEASE = 3
TRIES_PER_EXTENSION = 4
"""Further tries before half of the time to the next extension is over, when nobody answers."""
NEVER_S = 3_600.0


@dataclass(slots=True)
class _Held:
    lease_s: float
    due_s: float
    is_acked: bool = False
    """Needs no extension; belongs to the next checkpoint all the same."""


class UncheckpointedLeases:
    """The batches that were handed out and that no checkpoint holds. Several threads may use it.

    ``wake`` is called when something is due earlier than was said before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._lost: dict[str, ForebayError] = {}
        self._busy: set[str] = set()
        """Batches that a call is about to end."""
        self.wake: Callable[[], None] = lambda: None

    def add(self, batch_id: str, lease_s: float) -> None:
        """A batch was handed out, or its lease renewed."""
        with self._lock:
            self._held[batch_id] = _Held(lease_s, self._clock() + lease_s / EXTENSIONS_PER_LEASE)
        self.wake()

    def drop(self, batch_ids: Iterable[str]) -> None:
        """These batches are this client's no more, as it wanted."""
        with self._lock:
            for batch_id in batch_ids:
                self._held.pop(batch_id, None)
                self._lost.pop(batch_id, None)

    def forget(self) -> None:
        """Everything was taken back, lost leases included."""
        with self._lock:
            self._held.clear()
            self._lost.clear()

    def exchange_acked(self, batch_ids: Iterable[str]) -> list[str]:
        """Another run is chosen, of which these batches are acked; those of the run before, all of them acked."""
        with self._lock:
            before = list(self._held)
            self._held = {batch_id: _Held(NEVER_S, NEVER_S, is_acked=True) for batch_id in batch_ids}
            return before

    def acked(self, batch_id: str) -> None:
        """A batch was acked; a checkpoint is still to hold it."""
        with self._lock:
            if batch_id in self._held:
                self._held[batch_id].is_acked = True

    @contextmanager
    def busy(self, batch_ids: Iterable[str]) -> Iterator[None]:
        """While a call ends these batches, nothing that is said of their leases counts."""
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
        """Batches that no checkpoint holds, in the order in which they were handed out."""
        with self._lock:
            return list(self._held)

    @property
    def leased_ids(self) -> list[str]:
        """Those of them that are not acked."""
        with self._lock:
            return [batch_id for batch_id, held in self._held.items() if not held.is_acked]

    # --- extending them

    @property
    def pause_s(self) -> float:
        """Seconds until a lease is to be extended."""
        with self._lock:
            due_s = [held.due_s for held in self._held.values() if not held.is_acked]
        return max(0.0, min(due_s) - self._clock()) if due_s else NEVER_S

    def due(self) -> list[tuple[str, float]]:
        """Batches whose leases are to be extended now, with their seconds."""
        now_s = self._clock()
        with self._lock:
            return [
                (batch_id, held.lease_s)
                for batch_id, held in self._held.items()
                if held.due_s <= now_s and not held.is_acked
            ]

    def extended(self, batch_id: str, *, is_done: bool) -> None:
        """A lease was extended; or nobody answered, and it is to be tried again soon."""
        with self._lock:
            if held := self._held.get(batch_id):
                pause_s = held.lease_s / EXTENSIONS_PER_LEASE
                held.due_s = self._clock() + (pause_s if is_done else pause_s / (2 * TRIES_PER_EXTENSION))

    def lose(self, batch_id: str, error: ForebayError) -> None:
        """The server says that a batch is not this client's any more."""
        with self._lock:
            if batch_id in self._held and batch_id not in self._busy:
                del self._held[batch_id]
                self._lost[batch_id] = error
            elif batch_id in self._held:  # its end was perhaps faster than its extension: that is no loss
                self._held[batch_id].due_s = self._clock() + self._held[batch_id].lease_s / EXTENSIONS_PER_LEASE

    def check(self) -> None:
        """Raise the error of a lost lease, once for each."""
        with self._lock:
            if self._lost:  # one for each call: whoever gets it may call again to hear of the next
                raise self._lost.pop(next(iter(self._lost)))


class Reads:
    """Ids of the requests whose batches may be leased without this client knowing. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._broken_off: dict[Hashable, list[str]] = {}
        """By what was wanted: the next read that wants the same asks again under the same id."""
        self._has_ended = False

    def begin(self, wanted: Hashable) -> str:
        """The id of a request that is about to be made. Raises ``ClientClosed``."""
        with self._lock:
            self._check()
            # Two reads of the same want that were both broken off are asked again one by one, the older first.
            waiting = self._broken_off.get(wanted)
            request_id = waiting.pop(0) if waiting else f"read-{token_hex(12)}"
            self._under_way.add(request_id)
            return request_id

    def break_off(self, wanted: Hashable, request_id: str) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self._under_way.discard(request_id)
            self._broken_off.setdefault(wanted, []).append(request_id)

    @contextmanager
    def taking(self, request_id: str) -> Iterator[None]:
        """What is in the answer is made this client's. Raises ``ClientClosed`` if the client has ended before.

        The request stays among the ``open_ids`` then, and also if the answer cannot be read.
        """
        # Under the lock to its end: between a check and the note of the lease, another thread could end the client.
        with self._lock:
            self._check()
            yield
            self._under_way.discard(request_id)

    def end(self) -> bool:
        """No request is made and no answer taken any more. False if that was so before."""
        with self._lock:
            is_first, self._has_ended = not self._has_ended, True
            return is_first

    def forget(self) -> None:
        """Batches of requests that were broken off were taken back."""
        with self._lock:
            self._broken_off.clear()

    @property
    def open_ids(self) -> set[str]:
        """Requests whose answers were not taken."""
        with self._lock:
            return self._under_way.union(*self._broken_off.values())

    def _check(self) -> None:
        if self._has_ended:
            raise ClientClosed
