"""Whether a server answers, all the time that something else is done to it."""

import threading
import time
from types import TracebackType
from typing import Self

import httpx

from tests.kit import ServerProcess

LIMIT_S = 2.0
"""``/healthz`` is never slower than this, whatever the load."""


class Liveness:
    """Asks ``/healthz`` within the ``with`` block, which ends with an error if one answer took too long.

    A server that is being killed or restarted refuses the connection or breaks it off; that is no slow answer.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.num_answers = 0
        self.slowest_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()
        if error is None:
            assert self.num_answers, "the server answered nothing"
            assert self.slowest_s < LIMIT_S, f"/healthz took {self.slowest_s:.1f} s:\n{self._server.log()}"

    def _ask(self) -> None:
        with httpx.Client(timeout=10 * LIMIT_S) as client:
            while not self._is_over.wait(0.05):
                began_s = time.monotonic()
                try:
                    client.get(f"{self._server.url}/healthz").raise_for_status()
                except httpx.TimeoutException:
                    pass
                except httpx.TransportError:
                    continue
                self.num_answers += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
