"""The engines of a run: assigns an engine to each rollout, with a circuit breaker for engines that fail."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import httpx

from forebay.core.addresses import without_login
from forebay.core.backoff import Backoff
from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import EngineError, InvalidInput
from forebay.core.starts.asked_arrays import NO_ARRAYS, AskedArrays
from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.cache_keys import CacheKey, CacheKeys
from forebay.engines.capture.notices import CaptureNotices
from forebay.engines.capture.policy_calls import marked
from forebay.engines.capture.turn import Turn
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.detect import DetectedEngine
from forebay.engines.dialect import SGLANG, EngineDialect
from forebay.engines.router_workers import admin_client
from forebay.engines.sglang import SGLangEngine
from forebay.telemetry.tracing.spans import SpanHandle

logger = logging.getLogger(__name__)

LISTED_TTL_S = 5.0
DEFAULTS_AGAIN_S = 30.0
ABORT_S = 5.0
PROBE_FIRST_S, PROBE_MAX_S = 0.1, 5.0
STOP_FIRST_S, STOP_MAX_S = 0.05, 0.5
REST_FIRST_S, REST_MAX_S = 0.5, 30.0

Call = tuple[str, str]
"""A call in flight: the server's address and the call's ``rid``."""


@dataclass(frozen=True)
class Target:
    """One server that chats are sent to: ``url`` without ``/v1``, and the name of its model.

    ``router`` is set if the server is a router, which supports no aborts and returns token ids only from ``/generate``.
    """

    url: str
    model: str
    dialect: EngineDialect
    engine: DetectedEngine
    router: SGLangEngine | None = None


class Member:
    """One of several servers: its rollouts or calls in flight, and its back-off after a failure."""

    def __init__(
        self, server: Target, clock: Clock | None = None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.server = server
        self._on_change = on_change
        self.in_flight = 0
        self.last_asked_ns = 0
        self.failures = 0
        self.defaults = server.dialect.unknown_defaults
        """The server's last reported defaults for omitted parameters."""
        self.ask_from_s = 0.0
        """When to ask for the defaults, by the monotonic clock: after a failure, another server may answer."""
        self._clock = clock or SystemClock()
        self._rests = Backoff(REST_FIRST_S, REST_MAX_S, is_exact=True)
        self._rests_until_s = 0.0

    @property
    def resting(self) -> bool:
        """Whether it failed recently; it is then used only if no other server is left."""
        return self._clock.monotonic() < self._rests_until_s

    def failed(self) -> None:
        """Start a back-off period, twice as long as the previous one, up to 30 s."""
        # Many calls in flight fail at once for one reason: they count as one failure.
        if self.resting:
            return
        self.failures += 1
        self._on_change()
        self.ask_from_s = 0.0
        self._rests_until_s = self._clock.monotonic() + self._rests.next_s()

    def recovered(self) -> None:
        """Reset the failures after the server answered."""
        if self.failures:
            self.failures = 0
            self._on_change()
        self._rests.reset()
        self._rests_until_s = 0.0


def least_loaded(members: Iterable[Member]) -> Member:
    """Return the next member to use: not backing off, fewest calls in flight, then least recently used."""
    return min(members, key=lambda member: (member.resting, member.in_flight, member.last_asked_ns))


class EnginePool:
    """The engines at ``urls`` (comma-separated text, or a list); each worker of a router is a separate member.

    ``on_waiting`` is called with True when a rollout waits because no engine is available, with False when one answers.
    ``template`` is the model's chat template, for routers whose workers cannot be reached. ``policy_models`` are the
    model names of the policy; None for any name. ``arrays`` are the side arrays to ask for in its calls.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key: str | None,
        model: str | None,
        on_waiting: Callable[[bool], None],
        template: ChatTemplate | None = None,
        policy_models: Iterable[str] | None = None,
        arrays: AskedArrays = NO_ARRAYS,
    ) -> None:
        listed = urls.split(",") if isinstance(urls, str) else urls
        stripped = dict.fromkeys(url.strip() for url in listed if url.strip())
        if not stripped:
            raise InvalidInput(f"remote_engine_url contains no address (got {urls!r})", field="remote_engine_url")
        self.api_key = api_key
        self.arrays = arrays
        self.weight_version: int | None = None
        """Version of the trainer's last announcement, if known here."""
        self.notices = CaptureNotices()
        self.on_found: Callable[[Sequence[str]], None] = lambda _: None
        """Called once, with the servers found first. Its errors are raised to the callers that wait for servers."""
        self.on_server: Callable[[str, bool], None] = lambda _, __: None
        """Called when calls of this pool find that a server fails (True) or answers again (False)."""
        self._urls = ", ".join(stripped)
        self._model, self._policy_models = model, policy_models
        self._engines = [DetectedEngine(url, api_key=api_key, model=model, template=template) for url in stripped]
        self._members: dict[str, Member] = {}
        self._current: list[Member] = []
        self._listed: frozenset[str] = frozenset()
        self._answering: tuple[str, ...] | None = None
        """The listed servers that answer; None if that must be determined again."""
        self._listed_s = -LISTED_TTL_S
        self._on_waiting = on_waiting
        self._num_waiting = 0
        self.cache_keys = CacheKeys(self.weights_at)
        self._probing = asyncio.Lock()
        self._listing = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._http: httpx.AsyncClient

    @property
    def urls(self) -> list[str]:
        """The configured addresses, without ``/v1``."""
        return [engine.url for engine in self._engines]

    async def __aenter__(self) -> Self:
        self._http = await self._stack.enter_async_context(admin_client(self.api_key))
        for engine in self._engines:
            await self._stack.enter_async_context(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cache_keys.close()
        await self._stack.aclose()

    def announce(self, weights: AnnouncedWeights | None) -> None:
        """Record the trainer's latest weight announcement; None if no trainer announces weights."""
        self.weight_version = weights.version if weights is not None else None
        self.cache_keys.announce(weights)

    def judged(self, key: CacheKey, turns: Iterable[Turn]) -> list[Turn]:
        """Mark the turns of a call that used another model, or a cache that other weights may have filled."""
        return marked(self.cache_keys.judged(key, turns), self._policy_models)

    async def weights_at(self, url: str) -> str | None:
        """Return the weight version of the server at ``url``; None if it reports none."""
        with suppress(EngineError, TimeoutError):
            return await self.dialect_at(url).admin(self._http, url).weight_version()
        return None

    def dialect_at(self, url: str) -> EngineDialect:
        """Return the kind of the server at ``url``."""
        member = self._members.get(url)
        return SGLANG if member is None else member.server.dialect

    async def load_at(self, url: str) -> EngineLoad | None:
        """Return the load of the server at ``url``; None if it does not report its load or does not answer."""
        with suppress(EngineError, TimeoutError):
            return await self.dialect_at(url).admin(self._http, url).load() if self._knows_aborts(url) else None
        return None

    def ask_load(self, span: SpanHandle, loop: asyncio.AbstractEventLoop) -> Mapping[str, Any] | None:
        """``on_open`` callback of an engine call's span: requests the load in ``loop`` and adds it to the span."""
        if loop.is_closed():
            return {}
        asyncio.run_coroutine_threadsafe(self._note_load(span), loop)
        return None

    async def _note_load(self, span: SpanHandle) -> None:
        named = span.at["engine"]
        url = next((each for each in self._members if without_login(each) == named), named)
        load = await self.load_at(url)
        span.note_open(**({} if load is None else {"load": asdict(load)}))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The configured addresses: engines, and routers of engines."""
        return tuple(engine.url for engine in self._engines)

    @property
    def http(self) -> httpx.AsyncClient:
        """The HTTP client for administrative calls."""
        return self._http

    async def take(self, preferred: str | None = None) -> Member:
        """Return the server for a rollout: the ``preferred`` one if it answers, otherwise the least loaded one.

        Waits while no engine answers.
        """
        await self.when_up()
        named = self._members.get(preferred or "")
        if named is not None and not named.failures and named.server.url in self._listed:
            return named
        return least_loaded(self._current)

    async def when_up(self) -> tuple[str, ...]:
        """Return the addresses that answer, as the same object while they are unchanged; waits while none does."""
        while True:
            await self._list_if_stale()
            if answering := self._up():
                return answering
            await self._wait_available()

    def _up(self) -> tuple[str, ...]:
        # Cached: called for every rollout, with up to ten thousand engines. Only an answer ends a failure.
        if self._answering is None:
            self._answering = tuple(member.server.url for member in self._current if not member.failures)
        return self._answering

    def _note_change(self) -> None:
        self._answering = None

    def _note_member(self, url: str) -> None:
        self._note_change()
        self.on_server(url, self._members[url].failures > 0)

    @contextmanager
    def occupied(self, member: Member) -> Iterator[None]:
        """Count a rollout as in flight at its server."""
        member.in_flight += 1
        member.last_asked_ns = time.monotonic_ns()
        try:
            yield
        finally:
            member.in_flight -= 1

    def failed(self, member: Member) -> None:
        """Record that a server does not answer: it backs off, and may return with other weights."""
        member.failed()
        self.cache_keys.forget(member.server.url)

    def note_server(self, url: str, *, is_failing: bool) -> None:
        """Record that another caller found the server at ``url`` failing, or answering again."""
        member = self._members.get(url)
        if member is not None and is_failing:
            self.failed(member)
        elif member is not None:
            member.recovered()

    async def abort(self, rid_prefix: str, calls: Iterable[Call] = ()) -> None:
        """Stop the ``calls`` in flight, then all calls with ``rid_prefix``, until they are gone or for 5 s."""
        # Exact ids first: SGLang supports an abort by prefix only through a workaround (see `aborts.py`).
        await asyncio.gather(*(self.abandon(url, rid) for url, rid in calls))
        await asyncio.gather(*(engine.abort(rid_prefix, timeout_s=ABORT_S) for engine in self._engines))

    async def stop(self, calls: Callable[[], Iterable[Call]], limit_s: float | None = ABORT_S) -> None:
        """Abort ``calls()`` at their engines repeatedly until none is left, or for ``limit_s`` seconds.

        Each call's client gets its tokens so far. Calls at engines without aborts are left alone.
        """
        pauses = Backoff(STOP_FIRST_S, STOP_MAX_S, is_exact=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while left := [call for call in calls() if self._knows_aborts(call[0])]:
                    await asyncio.gather(*(self.abandon(url, rid) for url, rid in left))
                    await pauses.wait()

    def _knows_aborts(self, url: str) -> bool:
        member = self._members.get(url)
        return member is not None and member.server.dialect.rid_name is not None

    async def abandon(self, url: str, rid: str) -> None:
        """Abort ``rid`` once, because its client is gone: a server notices a closed connection only after seconds."""
        if not self._knows_aborts(url):
            return
        # A router supports no aborts: they are sent to its reachable workers.
        server = self._members[url].server
        await (server.router or server.dialect.admin(self._http, url)).abandon(rid)

    def template_at(self, url: str) -> ChatTemplate | None:
        """Return the template for chats to ``url`` that must use ``/generate``, or None."""
        member = self._members.get(url)
        router = member.server.router if member is not None else None
        return router.template if router is not None else None

    async def _wait_available(self) -> None:
        """Return as soon as an engine answers; all waiting rollouts share the probes."""
        pauses = Backoff(PROBE_FIRST_S, PROBE_MAX_S, is_exact=True)
        with self._waiting():
            while not await self._probe():
                await pauses.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._num_waiting += 1
        if self._num_waiting == 1:
            logger.warning("no engine answers at %s: waiting", self._urls)
            self._on_waiting(True)
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                logger.info("no longer waiting for an engine")
                self._on_waiting(False)

    async def _probe(self) -> bool:
        # One caller probes at a time; the others use its result.
        async with self._probing:
            if self._up():
                return True
            answers = await asyncio.gather(*(engine.is_available() for engine in self._engines))
            if any(answers):
                await self._list_targets()
            for member in self._current:
                if answers[self._engines.index(member.server.engine)]:
                    member.recovered()
            await self._ask_defaults()
            return bool(self._up())

    async def _list_if_stale(self) -> None:
        async with self._listing:
            if time.monotonic() - self._listed_s >= LISTED_TTL_S:
                await self._list_targets()

    async def _list_targets(self) -> None:
        # A server that is listed again keeps its member, with calls in flight and failures.
        listed = await asyncio.gather(*(self._targets_of(engine) for engine in self._engines))
        # Only now: whoever asked may have given up meanwhile, and the next caller must not find an empty list.
        self._listed_s = time.monotonic()
        targets = [target for targets in listed for target in targets]
        self._current = [self._member_of(target) for target in targets]
        self._listed = frozenset(target.url for target in targets)
        self._note_change()
        if targets:
            self.on_found([target.url for target in targets])
            self.on_found = lambda _: None
        await self._ask_defaults()

    def _member_of(self, target: Target) -> Member:
        found = self._members.get(target.url)
        if found is None:
            found = self._members[target.url] = Member(target, on_change=lambda: self._note_member(target.url))
        return found

    async def _ask_defaults(self) -> None:
        now_s = time.monotonic()
        asked = [member for member in self._current if member.ask_from_s <= now_s and not member.failures]
        answers = await asyncio.gather(*(each.server.dialect.defaults(self._http, each.server.url) for each in asked))
        for member, defaults in zip(asked, answers, strict=True):
            # Rollouts wait for the answer, so an engine that is too busy to answer is not asked again for a while.
            member.ask_from_s = now_s + DEFAULTS_AGAIN_S if defaults is None else math.inf
            member.defaults = defaults or member.defaults

    async def _targets_of(self, engine: DetectedEngine) -> list[Target]:
        try:
            found = await engine.found()
            sglang = found if isinstance(found, SGLangEngine) else None
            model = self._model or (await found.model_info()).model
            urls = [found.url] if sglang is None else await sglang.workers()
        except (EngineError, TimeoutError):
            # Keep the servers known before: they may answer when next asked.
            return [member.server for member in self._members.values() if member.server.engine is engine]
        router = sglang if sglang is not None and sglang.is_through_router else None
        return [Target(url, model, found.dialect, engine, router) for url in urls]
