"""The engines of a run: which one a rollout talks to, and the circuit breaker before them."""

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
from forebay.core.weight_versions import AnnouncedWeights
from forebay.engines.abc import EngineLoad
from forebay.engines.cache_keys import CacheKey, CacheKeys
from forebay.engines.capture.fill_gaps import weight_version_of
from forebay.engines.capture.notices import CaptureNotices
from forebay.engines.capture.policy_calls import marked
from forebay.engines.capture.sampling_params import UNKNOWN_DEFAULTS, EngineDefaults
from forebay.engines.capture.turn import Turn
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.detect import DetectedEngine
from forebay.engines.router_workers import WorkerAdmin, admin_client
from forebay.engines.sampling_defaults import engine_defaults
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
    """One server that chats are sent to: ``url`` without ``/v1``, and the name of the model that it serves.

    ``router`` is given where that is a router, which knows no aborts and tells token ids over ``/generate`` alone.
    """

    url: str
    model: str
    is_sglang: bool
    engine: DetectedEngine
    router: SGLangEngine | None = None


class Member:
    """One server of several: the rollouts or calls that it has, and its rest after a failure."""

    def __init__(
        self, server: Target, clock: Clock | None = None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.server = server
        self._on_change = on_change
        self.in_flight = 0
        self.last_asked_ns = 0
        self.failures = 0
        self.defaults = UNKNOWN_DEFAULTS
        """What it takes for parameters that a call leaves out, as it said last."""
        self.ask_from_s = 0.0
        """When it may be asked so, by the monotonic clock: again after a failure, as another may answer then."""
        self._clock = clock or SystemClock()
        self._rests = Backoff(REST_FIRST_S, REST_MAX_S, is_exact=True)
        self._rests_until_s = 0.0

    @property
    def resting(self) -> bool:
        """It failed a short while ago and is asked only when nobody else is left."""
        return self._clock.monotonic() < self._rests_until_s

    def failed(self) -> None:
        """Start a rest, twice as long as the one before, up to 30 s."""
        # Many calls in flight at once fail for one reason: they count as one failure.
        if self.resting:
            return
        self.failures += 1
        self._on_change()
        self.ask_from_s = 0.0
        self._rests_until_s = self._clock.monotonic() + self._rests.next_s()

    def recovered(self) -> None:
        """Forget earlier failures: it has answered."""
        if self.failures:
            self.failures = 0
            self._on_change()
        self._rests.reset()
        self._rests_until_s = 0.0


def least_loaded(members: Iterable[Member]) -> Member:
    """The member to ask next: not resting, fewest calls in flight, then the one not asked for longest."""
    return min(members, key=lambda member: (member.resting, member.in_flight, member.last_asked_ns))


class EnginePool:
    """The engines at ``urls`` (one text with commas, or a list); behind a router each worker counts by itself.

    ``on_waiting`` is called with True when every engine is unavailable and somebody waits, with False when one answers.
    ``template`` is that of the model, for routers whose workers cannot be reached. ``policy_models`` are the names
    that the policy is asked by; None for any.
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
    ) -> None:
        listed = urls.split(",") if isinstance(urls, str) else urls
        stripped = dict.fromkeys(url.strip() for url in listed if url.strip())
        if not stripped:
            raise InvalidInput("remote_engine_url names no engine", field="remote_engine_url")
        self.api_key = api_key
        self.weight_version: int | None = None
        """What the trainer announced last, as far as it is known here."""
        self.notices = CaptureNotices()
        self.on_found: Callable[[Sequence[str]], None] = lambda _: None
        """Called once, with the servers that were found first; what it raises, whoever waits for them gets."""
        self.on_server: Callable[[str, bool], None] = lambda _, __: None
        """Told by the calls of this pool that a server does not answer (true), and that it does again."""
        self._urls = ", ".join(stripped)
        self._model, self._policy_models = model, policy_models
        self._engines = [DetectedEngine(url, api_key=api_key, model=model, template=template) for url in stripped]
        self._members: dict[str, Member] = {}
        self._current: list[Member] = []
        self._listed: frozenset[str] = frozenset()
        self._answering: tuple[str, ...] | None = None
        """Of those, what answers; None where it is to be looked up."""
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
        """The addresses that it was given, without ``/v1``."""
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
        """The trainer has said this last of the engines' weights; None where no trainer says anything."""
        self.weight_version = weights.version if weights is not None else None
        self.cache_keys.announce(weights)

    def judged(self, key: CacheKey, turns: Iterable[Turn]) -> list[Turn]:
        """The turns of a call, marked where another model was asked, or other weights may have filled its cache."""
        return marked(self.cache_keys.judged(key, turns), self._policy_models)

    async def weights_at(self, url: str) -> str | None:
        """The weight version of the server at ``url``; None if it reports none."""
        return await weight_version_of(self._http, url)

    async def load_at(self, url: str) -> EngineLoad | None:
        """What the server at ``url`` is busy with; None where it does not say, or does not answer."""
        member = self._members.get(url)
        if member is None or not member.server.is_sglang:
            return None
        with suppress(EngineError, TimeoutError):
            return await WorkerAdmin(self._http, url).load()
        return None

    def ask_load(self, span: SpanHandle, loop: asyncio.AbstractEventLoop) -> Mapping[str, Any] | None:
        """The ``on_open`` of an engine call's span: the answer is added to its note once it has come, in ``loop``."""
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
        """What it was given: engines, and routers before some."""
        return tuple(engine.url for engine in self._engines)

    @property
    def http(self) -> httpx.AsyncClient:
        """The connections that administrative calls go over."""
        return self._http

    async def take(self, preferred: str | None = None) -> Member:
        """The server that a rollout should talk to now: the ``preferred`` one if it answers, else the least loaded one.

        Waits while no engine answers.
        """
        await self.when_up()
        named = self._members.get(preferred or "")
        if named is not None and not named.failures and named.server.url in self._listed:
            return named
        return least_loaded(self._current)

    async def when_up(self) -> tuple[str, ...]:
        """The addresses of the servers that answer, the same object while they are the same; waits while none does."""
        while True:
            await self._list_if_stale()
            if answering := self._up():
                return answering
            await self._wait_available()

    def _up(self) -> tuple[str, ...]:
        # Asked for every rollout, of ten thousand engines perhaps. That a rest is over brings none up: its answer does.
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
        """Count a rollout against the server that it talks to."""
        member.in_flight += 1
        member.last_asked_ns = time.monotonic_ns()
        try:
            yield
        finally:
            member.in_flight -= 1

    def failed(self, member: Member) -> None:
        """A server does not answer: it rests, and may come back with other weights."""
        member.failed()
        self.cache_keys.forget(member.server.url)

    def note_server(self, url: str, *, is_failing: bool) -> None:
        """Somebody else has found that the server at ``url`` does not answer, or does again."""
        member = self._members.get(url)
        if member is not None and is_failing:
            self.failed(member)
        elif member is not None:
            member.recovered()

    async def abort(self, rid_prefix: str, calls: Iterable[Call] = ()) -> None:
        """Stop the ``calls`` in flight, then whatever else has ``rid_prefix``, until it is gone or for 5 s."""
        # By their own ids first: an abort by prefix reaches SGLang only by a detour (see `aborts.py`).
        await asyncio.gather(*(self.abandon(url, rid) for url, rid in calls))
        await asyncio.gather(*(engine.abort(rid_prefix, timeout_s=ABORT_S) for engine in self._engines))

    async def stop(self, calls: Callable[[], Iterable[Call]], limit_s: float | None = ABORT_S) -> None:
        """Have the engines end ``calls()``, again and again until none is left, or for ``limit_s`` seconds.

        Each call's own client gets what its engine had by then. Calls at engines that know no aborts are left alone.
        """
        pauses = Backoff(STOP_FIRST_S, STOP_MAX_S, is_exact=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while left := [call for call in calls() if self._knows_aborts(call[0])]:
                    await asyncio.gather(*(self.abandon(url, rid) for url, rid in left))
                    await pauses.wait()

    def _knows_aborts(self, url: str) -> bool:
        member = self._members.get(url)
        return member is not None and member.server.is_sglang

    async def abandon(self, url: str, rid: str) -> None:
        """Say to a server once that nobody waits for ``rid``: it would notice a closed connection after seconds."""
        if not self._knows_aborts(url):
            return
        # A router knows no aborts: its workers are asked, those that can be reached.
        router = self._members[url].server.router
        await (router or WorkerAdmin(self._http, url)).abandon(rid)

    def template_at(self, url: str) -> ChatTemplate | None:
        """For chats to the server at ``url`` that should go over ``/generate``."""
        member = self._members.get(url)
        router = member.server.router if member is not None else None
        return router.template if router is not None else None

    async def _wait_available(self) -> None:
        """The circuit breaker: returns as soon as an engine answers, however many wait."""
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
        # One caller at a time; those that come after it find its answer.
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
        self._listed_s = time.monotonic()
        # A server that is listed again is the same member: its calls in flight and its failures count on.
        listed = await asyncio.gather(*(self._targets_of(engine) for engine in self._engines))
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
        answers = await asyncio.gather(*(self._defaults_of(member.server) for member in asked))
        for member, defaults in zip(asked, answers, strict=True):
            # Rollouts wait for the answer: an engine that is too busy to give one is left alone for a while.
            member.ask_from_s = now_s + DEFAULTS_AGAIN_S if defaults is None else math.inf
            member.defaults = defaults or member.defaults

    async def _defaults_of(self, server: Target) -> EngineDefaults | None:
        # Other servers do not tell: they would be asked for a page that they have not.
        return await engine_defaults(self._http, server.url) if server.is_sglang else UNKNOWN_DEFAULTS

    async def _targets_of(self, engine: DetectedEngine) -> list[Target]:
        try:
            found = await engine.found()
            sglang = found if isinstance(found, SGLangEngine) else None
            model = self._model or (await found.model_info()).model
            urls = [found.url] if sglang is None else await sglang.workers()
        except (EngineError, TimeoutError):
            # Those that were known before: they may be back when they are next asked.
            return [member.server for member in self._members.values() if member.server.engine is engine]
        router = sglang if sglang is not None and sglang.is_through_router else None
        return [Target(url, model, sglang is not None, engine, router) for url in urls]
