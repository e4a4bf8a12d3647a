"""What goes around each engine call of a rollout."""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import httpx
import openai

from forebay.core.ids import attempt_rid_prefix, call_rid
from forebay.engines.cache_keys import CacheKey
from forebay.engines.capture.call_spans import CallSpan, ended
from forebay.engines.capture.notices import CaptureNotices
from forebay.engines.capture.request_fields import asking
from forebay.engines.capture.sampling_params import EngineDefaults
from forebay.engines.capture.token_cap import TokenCap, was_cut
from forebay.engines.capture.turn import Turn
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.pool import Call, EnginePool, Member, Target
from forebay.generators.failures import EngineWaitOver
from forebay.generators.rollouts.call_failures import is_unavailable
from forebay.generators.rollouts.chat_turn import ChatTurn
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup, RolloutBroken
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.telemetry.tracing.tracer import AttemptTrace, SpanHandle

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

    def __init__(
        self,
        pool: EnginePool,
        member: Member,
        group: OpenGroup,
        names: "CallNames",
        trace: AttemptTrace,
        rollout_slot: RolloutSlot,
    ) -> None:
        self.wait_over: EngineWaitOver | None = None
        """Why no call goes out any more, once no engine has answered for too long."""
        self.group = group
        self.trace = trace
        self.rollout_slot = rollout_slot
        self.cap = TokenCap(rollout_slot.cap_tokens)
        self.is_broken = False
        """Its cap has ended it: no call goes out any more."""
        self._pool = pool
        self._member = member
        self._occupied: ExitStack | None = None
        self._names = names
        self._loop = asyncio.get_running_loop()
        self._ask_load = partial(pool.ask_load, loop=self._loop)
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
        return self._pool.notices

    @property
    def http(self) -> httpx.AsyncClient:
        """For what engines are asked beside the calls; used in the event loop."""
        return self._pool.http

    def template_at(self, url: str) -> ChatTemplate | None:
        """For chats to the server at ``url`` that should go over ``/generate``, so that they tell their tokens."""
        return self._pool.template_at(url) if self.group.captures else None

    @contextmanager
    def occupying(self) -> Iterator[None]:
        """Count the rollout against the engine that it talks to, which may become another one."""
        self._occupied = ExitStack()
        self._occupy(self._occupied)
        try:
            yield
        finally:
            self._occupied.close()
            self._occupied = None
            self.rollout_slot.move(None)

    def _occupy(self, occupied: ExitStack) -> None:
        occupied.enter_context(self._pool.occupied(self._member))
        self.rollout_slot.move(self._member.server.url)

    @property
    def is_open(self) -> bool:
        """Whether calls may go out: not while the run is held for its trainer, or its engines stand still."""
        return self.group.hold.may_call and self._is_key_known

    @property
    def _is_key_known(self) -> bool:
        return not self.target.is_sglang or self._pool.cache_keys.has(self.target.url)

    async def when_open(self, turn: SpanHandle | None = None) -> None:
        """Return when calls may go out; for a call of ``turn``."""
        if self.is_open:
            return
        with self.group.working():
            if not self.group.hold.may_call:
                with ended(self.trace.begin("hold", up=turn)):
                    await self.group.hold.wait_call()
            if not self._is_key_known:
                with ended(self.trace.begin("engine_wait", up=turn)):
                    await self._pool.cache_keys.prepare(self.target.url)

    def wait_open(self, turn: SpanHandle | None = None) -> None:
        """``when_open`` for a rollout in a thread."""
        if not self.is_open:
            self.in_loop(self.when_open(turn))

    @contextmanager
    def one_call(self, options: Any, default_timeout: Any, turn: ChatTurn | None = None) -> Iterator[Any]:
        """Around one HTTP request: yields ``options`` with address, time limit and ``rid`` set.

        The ``turn`` has the call's span, which an error ends, and else whoever reads the answer.

        Raises ``GroupClosed`` instead, and also in place of the error that a call of a closed group ends with, and
        ``CutShort`` in place of a time-out that nobody asked for; ``RolloutBroken`` where its cap leaves nothing.
        """
        self.check()
        if self.cap.is_spent and is_chat(options):
            self.break_off()
        turn = turn or ChatTurn()
        with self._lock:
            member = self._member
            call = (member.server.url, next(self._names))
        turn.call = span = CallSpan(self.trace, turn.span, *call, self._ask_load)
        self.group.hold.note_call(span)
        # In flight before it is sent: whoever closes the group must find every call that an engine may have.
        try:
            with span.failing(), self.group.in_flight(call):
                bound = self._bound(options, default_timeout, call, span.traceparent)
                yield bound
            member.recovered()
        except (openai.APITimeoutError, asyncio.CancelledError) as error:
            self.abandon(*call)
            if isinstance(error, openai.APITimeoutError):
                self.check()
            else:  # a cancelled task stays one, unless its group is closed
                self._check_group()
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
        """Raise ``GroupClosed`` if the group is closed, or is about to be, and ``RolloutBroken`` after the cap."""
        self._check_group()
        if self.is_broken or self.wait_over is not None:
            raise RolloutBroken(self._names.prefix)

    def _check_group(self) -> None:
        if self.group.left_s() < EXPIRED_S:
            raise GroupClosed(self.group.group_id)

    # --- at the cap

    def check_cut(self, turns: Iterable[Turn], cut_at: int | None) -> None:
        """Raise ``RolloutBroken`` if the cap, which allowed ``cut_at`` tokens, has ended a call with these turns."""
        if was_cut(turns, cut_at):
            self.break_off()

    def break_off(self) -> NoReturn:
        """The cap is reached: ends the other calls at their engines. Raises ``RolloutBroken``."""
        if not self.is_broken:
            self.is_broken = True
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(self.end_calls(), self._loop)
        self._check_group()
        raise RolloutBroken(self._names.prefix)

    async def end_calls(self) -> None:
        """Have the engines end those of the rollout: so it is known what they have sampled."""
        await self._pool.stop(lambda: [call for call in self.group.calls() if call[1].startswith(self._names.prefix)])

    async def replace_engine(self) -> None:
        """The engine is gone: go on with another one, or wait until one answers."""
        if not self._member.failures:
            return  # another call of the rollout was here before, or the engine is back
        with self.group.working():
            self._member = await self._taken()
        if self._occupied is not None:
            self._occupied.close()
            self._occupy(self._occupied)

    async def _taken(self) -> Member:
        try:
            return await taken(self._pool, None, self.group.hold.engine_wait_s)
        except EngineWaitOver as error:
            self.wait_over = error
            raise RolloutBroken(self._names.prefix) from error  # ends functions that retry on any Exception

    def note_away(self) -> None:
        """The rollout has found that no engine answers: none begins before one does."""
        self._pool.failed(self._member)

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
        return self._pool.cache_keys.sent(body.get("extra_key")) or self._pool.cache_keys.of(url)

    def judged(self, key: CacheKey, turns: Iterable[Turn]) -> list[Turn]:
        """The turns of a call, marked where other weights may have filled its cache, with the run's own versions."""
        return self._pool.judged(key, turns)

    def _note_gone(self, member: Member, error: BaseException) -> bool:
        """Whether a call failed because its engine is gone, which is noted."""
        is_gone = isinstance(error, openai.APIError) and is_unavailable(error)
        if is_gone:
            self._pool.failed(member)
        return is_gone

    def abandon(self, url: str, rid: str) -> None:
        """Let the engine know that nobody waits for ``rid`` any more; returns at once."""
        # A thread may outlive the run that its group was of.
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._pool.abandon(url, rid), self._loop)

    def _bound(self, options: Any, default_timeout: Any, call: Call, traceparent: str) -> Any:
        url, rid = call
        changed: dict[str, Any] = {
            "url": f"{url}/v1/{options.url.lstrip('/')}",
            "timeout": _at_most(_given(options, default_timeout), self.group.left_s()),
        }
        # Other servers may refuse fields that they do not know.
        if self.target.is_sglang and isinstance(options.json_data, dict):
            changed["extra_json"] = self._extra_fields(options, url, rid)
        if self.cap.tokens is not None and is_chat(options):
            given = changed.get("extra_json", options.extra_json or {})
            changed["extra_json"] = {**given, **self.cap.limits(body_of(options))}
        given = headers_of(options) if traceparent else {}
        # One that the user's code gives itself comes before ours.
        if traceparent and not any(name.lower() == "traceparent" for name in given):
            changed["headers"] = {**given, "traceparent": traceparent}
        return options.model_copy(update=changed)

    def _extra_fields(self, options: Any, url: str, rid: str) -> dict[str, Any]:
        given = {"rid": rid, **(options.extra_json or {})}
        if not is_chat(options):
            return given
        body = {**options.json_data, **given}
        # Else a prompt's cache may be that of other weights, where an update did not empty it.
        key = self._pool.cache_keys.of(url)
        given["extra_key"] = body["extra_key"] = key.beside(body.get("extra_key"))
        return asking(body, is_stream=bool(body.get("stream"))) if self.group.captures else given


async def taken(pool: EnginePool, preferred: str | None, limit_s: float) -> Member:
    """The server that a rollout should talk to now. Raises ``EngineWaitOver``."""
    try:
        async with asyncio.timeout(limit_s):
            return await pool.take(preferred)
    except TimeoutError as error:
        raise EngineWaitOver(limit_s) from error


class CallNames:
    """The ``rid`` of each call of one attempt, in order. All begin with ``prefix``."""

    def __init__(self, run_id: str, group: OpenGroup, slot: int, attempt: int) -> None:
        self.prefix = attempt_rid_prefix(run_id, group.group_id, slot, attempt)
        self._numbers = itertools.count()

    def __next__(self) -> str:
        return call_rid(self.prefix, next(self._numbers))


def is_chat(options: Any) -> bool:
    """Whether a call of the openai package is a chat."""
    return bool(options.url.endswith(CHAT_PATH))


def body_of(options: Any) -> dict[str, Any]:
    """The body of a call of the openai package."""
    given = options.json_data if isinstance(options.json_data, dict) else {}
    return {**given, **(options.extra_json or {})}


def headers_of(options: Any) -> dict[str, Any]:
    """Those that a call of the openai package was given itself."""
    return dict(options.headers) if isinstance(options.headers, Mapping) else {}


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
