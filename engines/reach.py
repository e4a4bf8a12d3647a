"""Which of the workers that a router lists can be reached from here."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from forebay.core.clock import Clock, SystemClock
from forebay.engines.wire import UNAVAILABLE_STATUSES

PROBE_TIMEOUT_S = 2.0
ASK_AGAIN_S = 30.0
OF_A_PROXY = UNAVAILABLE_STATUSES | {504}
"""What a proxy answers for an address that it cannot reach."""


@dataclass(frozen=True)
class _Answer:
    is_reached: bool
    asked_s: float


class Reach:
    """Knows which addresses answer here: a router may list those of a network of its own.

    One that has answered once counts as reachable from then on: if it no longer answers, it is down. One that did not
    is asked again after 30 s.
    """

    def __init__(self, http: httpx.AsyncClient, clock: Clock | None = None) -> None:
        self._http = http
        self._clock = clock or SystemClock()
        self._answers: dict[str, _Answer] = {}

    async def among(self, urls: Iterable[str]) -> set[str]:
        """Those of ``urls`` that can be reached; takes up to 2 s."""
        listed = list(urls)
        await asyncio.gather(*(self._ask(url) for url in listed if self._is_due(url)))
        return {url for url in listed if self._answers[url].is_reached}

    def _is_due(self, url: str) -> bool:
        known = self._answers.get(url)
        return known is None or (not known.is_reached and self._clock.monotonic() - known.asked_s > ASK_AGAIN_S)

    async def _ask(self, url: str) -> None:
        try:
            reply = await self._http.get(f"{url}/model_info", timeout=PROBE_TIMEOUT_S)
            is_reached = reply.status_code not in OF_A_PROXY
        except httpx.ReadTimeout:
            is_reached = True  # somebody is there, and busy
        except httpx.TransportError:
            is_reached = False
        self._answers[url] = _Answer(is_reached, self._clock.monotonic())
