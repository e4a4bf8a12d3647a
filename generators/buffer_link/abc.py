"""What a run process says to its buffer, and hears from it."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from forebay.core.backoff import Backoff
from forebay.core.errors import ForebayError
from forebay.generators.job.schedule import GroupKey, Plan
from forebay.generators.job.step_gate import Step

logger = logging.getLogger(__name__)

GONE = frozenset({404, 410})
"""Statuses that say: the run is over, nothing sent to it will be used."""
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
"""Statuses that say: the same request is right a little later."""


class RunGone(ForebayError):
    """The buffer wants nothing more from this run: it was stopped, or it ended."""

    code = "run_gone"
    status = 410


class LinkRefused(ForebayError):
    """The buffer does not understand this run process."""

    code = "link_refused"
    status = 502


class BufferBusy(ForebayError):
    """The buffer took nothing; the samples are to be offered again, one by one if ``may_split``."""

    code = "buffer_busy"
    status = 503

    def __init__(self, retry_after_s: float | None = None, *, may_split: bool = False) -> None:
        super().__init__("the buffer takes nothing now", hint="offer the samples again")
        self.retry_after_s = retry_after_s
        self.may_split = may_split


@dataclass(frozen=True)
class Verdict:
    """What became of one offered sample: acknowledged, to be offered again, or refused for good."""

    must_repeat: bool = False
    problem: str = ""


ACKNOWLEDGED = Verdict()
REPEAT = Verdict(must_repeat=True)


@dataclass(frozen=True)
class Progress:
    """What a run process tells about itself. None leaves what was told before as it is."""

    opened: Sequence[GroupKey] = ()
    is_waiting_for_engine: bool | None = None
    is_held: bool | None = None
    num_groups_total: int | None = None
    is_last_slot_reported: bool | None = None
    process_id: str = ""
    counts: Mapping[str, int] | None = None
    """All that the process of this id has counted."""


@dataclass(frozen=True)
class ClosedGroups:
    """One answer of the feed: ids of closed groups, and whether the run was ended.

    ``last``, ``seen`` and ``is_paused`` are what to ask with the next time; ``step`` is where the trainer is.
    """

    group_ids: Sequence[str] = field(default_factory=list)
    last: int = 0
    is_run_over: bool = False
    step: Step | None = None
    seen: int = 0
    is_paused: bool = False
    """The engines stand still, while they are given other weights say."""


class Link(ABC):
    """The way to one buffer. Calls are made again until they are answered; ``RunGone`` when the run is over."""

    has_feed: bool
    """Whether the buffer tells which groups it closed."""
    takes_failed: bool
    """Whether a failed sample may be sent: slime's own buffer cannot be read any more after one."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(90.0, connect=10.0))

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    @abstractmethod
    async def plan(self, fallback: Plan) -> Plan:
        """What there is to do; ``fallback`` is the answer of a buffer that cannot say."""

    @abstractmethod
    async def write(self, samples: list[bytes]) -> list[Verdict]:
        """Offer encoded samples once. Raises ``BufferBusy`` when none was looked at."""

    @abstractmethod
    async def report(self, progress: Progress) -> None:
        """Tell how far the run is."""

    @abstractmethod
    async def closed_groups(self, told: ClosedGroups) -> ClosedGroups:
        """Wait up to 25 s for what is news after what was ``told`` last."""

    async def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """One request, made again with growing pauses while the buffer cannot be reached or is busy."""
        pause = Backoff()
        while True:
            response = await self._try(method, path, **request)
            if response is not None and response.status_code not in BUSY:
                return response
            await pause.wait(retry_after_s(response))

    async def _try(self, method: str, path: str, **request: Any) -> httpx.Response | None:
        """One request; None if the buffer cannot be reached."""
        try:
            response = await self._http.request(method, f"{self._url}/{path}", **request)
        except httpx.TransportError as error:
            logger.warning("the buffer does not answer (%s: %s)", type(error).__name__, error)
            return None
        if response.status_code in GONE:
            raise RunGone(f"the buffer answers {response.status_code} for this run: {response.text[:200]}")
        return response


def retry_after_s(response: httpx.Response | None) -> float | None:
    """The seconds of a reply's Retry-After, at most a minute; None where there is none."""
    told = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(told), 60.0) if told.isdecimal() else None
