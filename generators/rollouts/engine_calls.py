"""What goes around each engine call of a rollout."""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import httpx
import httpx2
import openai

from forebay.core.ids import request_id
from forebay.engines.cache_keys import CacheKey
from forebay.engines.capture.notices import CaptureNotices
from forebay.engines.capture.request_fields import asking
from forebay.engines.capture.sampling_params import EngineDefaults
from forebay.engines.capture.turn import Turn
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.ring import Call, EngineRing, Member, Target
from forebay.engines.router_workers import UNAVAILABLE_STATUSES
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup

T = TypeVar("T")

CHAT_PATH = "/chat/completions"
CONNECT_TIMEOUT_S = 10.0
EXPIRED_S = 0.05
"""A call ends by its time limit a moment before its group is closed: that is no error of the rollout."""


class CutShort(Exception):
    """A call had as long as its group, which goes on: its time stood still, or another sample came. Ask again."""


class EngineCalls:
    """Goes around each engine call of one rollout: its ``rid``, its time limit, and another engine when one is gone.

    SGLang engines are asked for token ids and logprobs, whatever the rollout function asks for.
    """

    def __init__(self, ring: EngineRing, member: Member, group: OpenGroup, names: Iterator[str]) -> None:
        self.group = group
        self._ring = ring
        self._member = member
        self._seat: ExitStack | None = None
        self._names = names
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()

    @property
    def target(self) -> Target:
        return self._member.server

    @property
    def defaults(self) -> EngineDefaults:
        """What its engine takes for sampling parameters that a call leaves out."""
        return self._member.defaults

    @property
    def notices(self) -> CaptureNotices:
        """What says, once for the run, that logprobs are not the policy's."""
        return self._ring.notices

    @property
    def http(self) -> httpx.AsyncClient:
        """For what engines are asked beside the calls; used in the event loop."""
        return self._ring.http

    def template_at(self, url: str) -> ChatTemplate | None:
        """For chats to the server at ``url`` that should go over ``/generate``, so that they tell their tokens."""
        return self._ring.template_at(url) if self.group.captures else None

    @contextmanager
    def occupying(self) -> Iterator[None]:
        """Count the rollout against the engine that it talks to, which may become another one."""
        self._seat = ExitStack()
        self._seat.enter_context(self._ring.occupied(self._member))
        try:
            yield
        finally:
            self._seat.close()
            self._seat = None

    async def when_open(self) -> None:
        """Return when calls may go out: not while the run is held for its trainer, or its engines stand still."""
        with self.group.working():
            await self.group.hold.wait_call()
            if self.target.is_sglang:
                await self._ring.cache_keys.prepare(self.target.url)

    def wait_open(self) -> None:
        """``when_open`` for a rollout in a thread."""
        is_ready = not self.target.is_sglang or self._ring.cache_keys.has(self.target.url)
        if not self.group.hold.may_call or not is_ready:
            self.in_loop(self.when_open())

    @contextmanager
    def one_call(self, options: Any, default_timeout: Any) -> Iterator[Any]:
        """Around one HTTP request: yields ``options`` with address, time limit and ``rid`` set.

        Raises ``GroupClosed`` instead, and also in place of the error that a call of a closed group ends with, and
        ``CutShort`` in place of a time-out that nobody asked for.
        """
        self.check()
        with self._lock:
            member = self._member
            call = (member.server.url, next(self._names))
        # In flight before it is sent: whoever closes the group must find every call that an engine may have.
        try:
            with self.group.in_flight(call):
                bound = self._bound(options, default_timeout, call)
                yield bound
            member.recovered()
        except (openai.APITimeoutError, asyncio.CancelledError) as error:
            self.abandon(*call)
            self.check()
            is_gone = self._note_gone(member, error)
            is_timeout = isinstance(error, openai.APITimeoutError) and not is_gone
            if is_timeout and bound.timeout.read != _read_s(_given(options, default_timeout)):
                raise CutShort from error
            raise
        except openai.APIError as error:
            self.check()
            self._note_gone(member, error)
            raise

    def check(self) -> None:
        """Raise ``GroupClosed`` if the group is closed, or is about to be."""
        if self.group.left_s() < EXPIRED_S:
            raise GroupClosed(self.group.group_id)

    async def replace_engine(self) -> None:
        """The engine is gone: go on with another one, or wait until one answers."""
        if not self._member.failures:
            return  # another call of the rollout was here before, or the engine is back
        with self.group.working():
            self._member = await self._ring.take()
        if self._seat is not None:
            self._seat.close()
            self._seat.enter_context(self._ring.occupied(self._member))

    def in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the event loop from the rollout's thread; ``GroupClosed`` when the group closes meanwhile."""
        if self._loop.is_closed():
            work.close()
            raise GroupClosed(self.group.group_id)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except concurrent.futures.CancelledError:
            raise GroupClosed(self.group.group_id) from None

    def key_of(self, url: str, body: Mapping[str, Any]) -> CacheKey:
        """Under which the engine at ``url`` caches a call that was sent with ``body``."""
        return self._ring.cache_keys.sent(body.get("extra_key")) or self._ring.cache_keys.of(url)

    def judged(self, key: CacheKey, turns: Iterable[Turn]) -> list[Turn]:
        """The turns of a call, marked where other weights may have filled its cache, with the run's own versions."""
        return self._ring.cache_keys.judged(key, turns)

    def _note_gone(self, member: Member, error: BaseException) -> bool:
        """Whether a call failed because its engine is gone, which is noted."""
        is_gone = isinstance(error, openai.APIError) and is_unavailable(error)
        if is_gone:
            self._ring.failed(member)
        return is_gone

    def abandon(self, url: str, rid: str) -> None:
        """Let the engine know that nobody waits for ``rid`` any more; returns at once."""
        # A thread may outlive the run that its group was of.
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._ring.abandon(url, rid), self._loop)

    def _bound(self, options: Any, default_timeout: Any, call: Call) -> Any:
        url, rid = call
        changed: dict[str, Any] = {
            "url": f"{url}/v1/{options.url.lstrip('/')}",
            "timeout": _at_most(_given(options, default_timeout), self.group.left_s()),
        }
        # Other servers may refuse fields that they do not know.
        if self.target.is_sglang and isinstance(options.json_data, dict):
            changed["extra_json"] = self._extra_fields(options, url, rid)
        return options.model_copy(update=changed)

    def _extra_fields(self, options: Any, url: str, rid: str) -> dict[str, Any]:
        given = {"rid": rid, **(options.extra_json or {})}
        if not options.url.endswith(CHAT_PATH):
            return given
        body = {**options.json_data, **given}
        # Else a prompt's cache may be that of other weights, where an update did not empty it.
        key = self._ring.cache_keys.of(url)
        given["extra_key"] = body["extra_key"] = key.beside(body.get("extra_key"))
        return asking(body, is_stream=bool(body.get("stream"))) if self.group.captures else given


def request_ids(run_id: str, group: OpenGroup, slot: int, attempt: int) -> Iterator[str]:
    """The ``rid`` of each call of one attempt, in order."""
    return (request_id(run_id, group.group_id, slot, attempt, number) for number in itertools.count())


def body_of(options: Any) -> dict[str, Any]:
    """The body of a call of the openai package."""
    given = options.json_data if isinstance(options.json_data, dict) else {}
    return {**given, **(options.extra_json or {})}


def _given(options: Any, default_timeout: Any) -> Any:
    """Seconds, a ``Timeout`` of the openai package, or None."""
    timeout = options.timeout
    is_given = timeout is None or isinstance(timeout, int | float | openai.Timeout)
    return timeout if is_given else default_timeout


def _read_s(given: Any) -> float | None:
    read_s = given.read if isinstance(given, openai.Timeout) else given
    return None if read_s is None else float(read_s)


def _at_most(given: Any, left_s: float) -> openai.Timeout:
    """``given``, cut to ``left_s``."""
    limit_s, read_s = max(left_s, 0.001), _read_s(given)
    read_s = limit_s if read_s is None else min(read_s, limit_s)
    return openai.Timeout(read_s, connect=min(CONNECT_TIMEOUT_S, limit_s))


def is_unavailable(error: openai.APIError) -> bool:
    """Whether a call failed because nobody answers at the engine's address, or it says 502 or 503."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in UNAVAILABLE_STATUSES
    if isinstance(error, openai.APITimeoutError):
        return isinstance(error.__cause__, httpx2.ConnectTimeout)
    return isinstance(error, openai.APIConnectionError)
