"""Requests for batches, until their answers are taken."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from secrets import token_hex

from forebay.client.errors import ClientClosed


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
