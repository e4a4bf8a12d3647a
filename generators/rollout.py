"""One execution of a rollout function: what it knows about itself, and what goes around each of its engine calls."""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import openai

from forebay.core.ids import InstanceId, request_id
from forebay.engines.balance import Member
from forebay.engines.wire import UNAVAILABLE_STATUSES
from forebay.generators.engine_ring import EngineRing, Target
from forebay.generators.groups import Call, GroupClosed, OpenGroup
from forebay.generators.trace import TokenTrace

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
EXPIRED_S = 0.05
"""A call ends by its time limit a moment before its group is closed: that is no error of the rollout."""


class Rollout:
    """What a rollout function finds as ``client.rollout``.

    Whatever it puts into ``extra_info`` (JSON values) becomes part of its sample's ``extra_info``.
    """

    def __init__(self, run_id: str, group: OpenGroup, slot: int, attempt: int, calls: "EngineCalls") -> None:
        self.run_id = run_id
        self.uid = f"{run_id}-{group.group_id}-{slot:04x}"
        self.instance_id: InstanceId = group.row.instance_id
        self.row: dict[str, Any] = group.row.fields
        self.prompt = group.row.prompt
        self.epoch = group.epoch
        self.slot = slot
        self.attempt = attempt
        self.rollout_id = f"{group.group_id}-{slot:04x}"
        self.extra_info: dict[str, Any] = {}
        self.trace = TokenTrace()
        self.calls = calls

    @property
    def model(self) -> str:
        """The name of the model that the engine serves."""
        return self.calls.target.model

    @property
    def engine_url(self) -> str:
        """The engine that this rollout talks to, without ``/v1``; another one after it failed."""
        return self.calls.target.url


class EngineCalls:
    """Goes around each engine call of one rollout: its ``rid``, its time limit, and another engine when one is gone."""

    def __init__(self, ring: EngineRing, member: Member[Target], group: OpenGroup, names: Iterator[str]) -> None:
        self.group = group
        self._ring = ring
        self._member = member
        self._names = names
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()

    @property
    def target(self) -> Target:
        return self._member.server

    @contextmanager
    def one_call(self, options: Any, default_timeout: Any) -> Iterator[Any]:
        """Around one HTTP request: yields ``options`` with address, time limit and ``rid`` set.

        Raises ``GroupClosed`` instead, and also in place of the error that a call of a closed group ends with.
        """
        self.check()
        with self._lock:
            member = self._member
            call = (member.server.url, next(self._names))
        try:
            with self.group.in_flight(call):
                yield self._bound(options, default_timeout, call)
            member.recovered()
        except (openai.APITimeoutError, asyncio.CancelledError):
            self._abandon(call)
            self.check()
            raise
        except openai.APIError:
            self.check()
            raise

    def check(self) -> None:
        """Raise ``GroupClosed`` if the group is closed, or is about to be."""
        if self.group.left_s() < EXPIRED_S:
            raise GroupClosed(self.group.group_id)

    async def replace_engine(self) -> None:
        """The engine is gone: go on with another one, or wait until one answers."""
        self._member.failed()
        with self.group.working():
            self._member = await self._ring.take()

    def in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the event loop from the rollout's thread; ``GroupClosed`` when the group closes meanwhile."""
        if self._loop.is_closed():
            work.close()
            raise GroupClosed(self.group.group_id)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except concurrent.futures.CancelledError:
            raise GroupClosed(self.group.group_id) from None

    def _abandon(self, call: Call) -> None:
        # A thread may outlive the run that its group was of.
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._ring.abandon(*call), self._loop)

    def _bound(self, options: Any, default_timeout: Any, call: Call) -> Any:
        url, rid = call
        given = options.timeout if _is_timeout(options.timeout) else default_timeout
        changed: dict[str, Any] = {
            "url": f"{url}/v1/{options.url.lstrip('/')}",
            "timeout": _at_most(given, self.group.left_s()),
        }
        # Other servers may refuse fields that they do not know.
        if self.target.is_sglang and isinstance(options.json_data, dict):
            changed["extra_json"] = {"rid": rid, **(options.extra_json or {})}
        return options.model_copy(update=changed)


def request_ids(run_id: str, group: OpenGroup, slot: int, attempt: int) -> Iterator[str]:
    """The ``rid`` of each call of one attempt, in order."""
    return (request_id(run_id, group.group_id, slot, attempt, number) for number in itertools.count())


def _is_timeout(value: object) -> bool:
    return value is None or isinstance(value, int | float | openai.Timeout)


def _at_most(given: Any, left_s: float) -> openai.Timeout:
    """``given`` (seconds, a ``Timeout`` of the openai package, or None), cut to ``left_s``."""
    limit_s = max(left_s, 0.001)
    read_s = given.read if isinstance(given, openai.Timeout) else given
    read_s = limit_s if read_s is None else min(float(read_s), limit_s)
    return openai.Timeout(read_s, connect=min(CONNECT_TIMEOUT_S, limit_s))


def is_unavailable(error: openai.APIError) -> bool:
    """Whether a call failed because nobody answers at the engine's address, or it says 502 or 503."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in UNAVAILABLE_STATUSES
    if isinstance(error, openai.APITimeoutError):
        # By name: the package stands on httpx or on httpx2, depending on its version.
        return type(error.__cause__).__name__ == "ConnectTimeout"
    return isinstance(error, openai.APIConnectionError)
