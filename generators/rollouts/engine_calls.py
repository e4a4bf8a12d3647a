"""Address, time limit, request id and error handling of each engine call of a rollout."""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import openai

from forebay.core.errors import EngineUnavailable
from forebay.core.ids import attempt_rid_prefix, call_rid
from forebay.engines.cache_keys import CacheKey
from forebay.engines.capture.call_spans import CallSpan, ended
from forebay.engines.capture.request_fields import ROUTED_START
from forebay.engines.capture.sampling_params import EngineDefaults
from forebay.engines.capture.token_cap import TokenCap, was_cut
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from forebay.engines.chat_template import ChatTemplate
from forebay.engines.dialect import PLAIN, SGLANG
from forebay.engines.pool import Call, EnginePool, Member, Target
from forebay.generators.failures import EngineWaitOver, EnvironmentFailed
from forebay.generators.rollouts.call_failures import is_unavailable
from forebay.generators.rollouts.chat_turn import ChatTurn
from forebay.generators.rollouts.open_group import GroupClosed, OpenGroup, RolloutBroken
from forebay.generators.rollouts.rollout_slot import RolloutSlot
from forebay.telemetry.tracing.tracer import AttemptTrace, SpanHandle

T = TypeVar("T")

CHAT_PATH = "/chat/completions"
RAW_HEADER = "X-Stainless-Raw-Response"
"""Set by ``with_raw_response`` of the openai package; the value ``stream`` means ``with_streaming_response``."""
CONNECT_TIMEOUT_S = 10.0
EXPIRED_S = 0.05
"""With less time than this left, a group counts as closed: calls time out shortly before their group closes."""


class Repeat(Exception):
    """Raised when a call should be repeated at once.

    It used up its group's time but the group got more, by a pause or a sample; or it asked for rows that lie behind its
    prompt.
    """


class EngineCalls:
    """Prepares each engine call of one rollout: sets ``rid`` and time limit, and replaces engines that are gone.

    SGLang engines are always asked for token ids and logprobs, even if the rollout function does not request them.
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
        """Set once no engine has answered for too long: no more calls are sent."""
        self.cut_off: EnvironmentFailed | None = None
        """Set if the function ended its last call while no engine answered."""
        self.group = group
        self.trace = trace
        self.rollout_slot = rollout_slot
        self.cap = TokenCap(rollout_slot.cap_tokens)
        self.recorded = Trajectory(names.prefix, arrays=pool.arrays)
        """The turns of the rollout's calls."""
        self.is_broken = False
        """Whether the token cap has ended the rollout: no more calls are sent."""
        self.pool = pool
        """The run's engines. Its HTTP client is only for use in the event loop."""
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
        """The engine's defaults for sampling parameters that a call leaves out."""
        return self._member.defaults

    def template_at(self, url: str) -> ChatTemplate | None:
        """Template for chats that must go to ``/generate`` of ``url`` because only that returns tokens; else None."""
        return self.pool.template_at(url) if self.group.captures else None

    @contextmanager
    def occupying(self) -> Iterator[None]:
        """Count the rollout in the load of its current engine, even when the engine is replaced."""
        self._occupied = ExitStack()
        self._occupy(self._occupied)
        try:
            yield
        finally:
            self._occupied.close()
            self._occupied = None
            self.rollout_slot.move(None)

    def _occupy(self, occupied: ExitStack) -> None:
        occupied.enter_context(self.pool.occupied(self._member))
        self.rollout_slot.move(self._member.server.url)

    @property
    def is_open(self) -> bool:
        """Whether calls may be sent: neither run nor engines are paused, and the engine's cache key is known."""
        return self.group.hold.may_call and self._is_key_known

    @property
    def _is_key_known(self) -> bool:
        return self.target.dialect.key_name is None or self.pool.cache_keys.has(self.target.url)

    async def when_open(self, turn: SpanHandle | None = None) -> None:
        """Wait until calls of ``turn`` may be sent."""
        with self.group.working():
            if not self.group.hold.may_call:
                with ended(self.trace.begin("hold", up=turn)):
                    await self.group.hold.wait_call()
            if not self._is_key_known:
                with ended(self.trace.begin("engine_wait", up=turn)):
                    await self.pool.cache_keys.prepare(self.target.url)

    @contextmanager
    def one_call(self, options: Any, default_timeout: Any, turn: ChatTurn | None = None) -> Iterator[Any]:
        """Wrap one HTTP request: yields ``options`` with address, time limit and ``rid`` set.

        ``turn`` holds the call's span. An error ends the span; otherwise the reader of the answer ends it.

        Raises ``GroupClosed`` if the group is closed, also in place of any error of the call. Raises ``Repeat`` in
        place of a timeout that the caller did not request, and ``RolloutBroken`` if the token cap is used up.
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
        # Registered before it is sent: closing the group must find every call that an engine may have.
        try:
            with span.failing(), self.group.in_flight(call):
                bound = self._bound(options, default_timeout, call, span.traceparent)
                yield bound
            member.recovered()
            self.cut_off = None
        except (openai.APITimeoutError, asyncio.CancelledError) as error:
            self.abandon(*call)
            if isinstance(error, openai.APITimeoutError):
                self.check()
            else:  # the task stays cancelled unless its group is closed
                self._check_group()
            is_gone = self._note_gone(member, error)
            is_timeout = isinstance(error, openai.APITimeoutError) and not is_gone
            if is_timeout and bound.timeout.read != _read_s(_given(options, default_timeout)):
                raise Repeat from error
            raise
        except (openai.APIError, EngineUnavailable) as error:
            self.check()
            if self.recorded.is_refusal(body_of(bound), error.message):
                raise Repeat from error
            self._note_gone(member, error)
            raise

    def check(self) -> None:
        """Raise ``GroupClosed`` if the group is closed or about to close, ``RolloutBroken`` if no calls may follow."""
        self._check_group()
        if self.is_broken or self.wait_over is not None:
            raise RolloutBroken(self._names.prefix)

    def _check_group(self) -> None:
        if self.group.left_s() < EXPIRED_S:
            raise GroupClosed(self.group.group_id)

    # --- at the cap

    def check_cut(self, turns: Iterable[Turn], cut_at: int | None) -> None:
        """Raise ``RolloutBroken`` if the cap, at ``cut_at`` tokens, cut the call that returned ``turns``."""
        if was_cut(turns, cut_at):
            self.break_off()

    def break_off(self) -> NoReturn:
        """End the rollout at its token cap: stop its other calls at their engines and raise ``RolloutBroken``."""
        if not self.is_broken:
            self.is_broken = True
            if not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(self.end_calls(), self._loop)
        self._check_group()
        raise RolloutBroken(self._names.prefix)

    async def end_calls(self) -> None:
        """Make the engines end the rollout's calls, so that the sampled tokens are known."""
        await self.pool.stop(lambda: [call for call in self.group.calls() if call[1].startswith(self._names.prefix)])

    @contextmanager
    def without_engine(self) -> Iterator[None]:
        """Wait for an engine inside this context: if the function ends the call meanwhile, the rollout fails."""
        try:
            with self.group.working():
                yield
        except asyncio.CancelledError:
            self.cut_off = EnvironmentFailed("no engine answered the call")
            raise

    async def replace_engine(self) -> None:
        """Switch to another engine, waiting until one answers. Does nothing if the current engine has no failures."""
        if not self._member.failures:
            return  # another call of the rollout has replaced it already, or the engine is back
        self._member = await self._taken()
        if self._occupied is not None:
            self._occupied.close()
            self._occupy(self._occupied)

    async def _taken(self) -> Member:
        try:
            return await taken(self.pool, None, self.group.hold.engine_wait_s)
        except EngineWaitOver as error:
            self.wait_over = error
            raise RolloutBroken(self._names.prefix) from error  # ends functions that retry on any Exception

    def note_away(self) -> None:
        """Mark the engine as failed, so that no rollout starts before an engine answers."""
        self.pool.failed(self._member)

    def in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the event loop from the rollout's thread. Raises ``GroupClosed`` if the group closes."""
        if self._loop.is_closed():
            work.close()
            raise GroupClosed(self.group.group_id)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except concurrent.futures.CancelledError:
            raise GroupClosed(self.group.group_id) from None

    def key_of(self, url: str, sent: str | None) -> CacheKey:
        """Cache key of a call that was sent with the key ``sent`` to the engine at ``url``."""
        return self.pool.cache_keys.sent(sent) or self.pool.cache_keys.of(url)

    def _note_gone(self, member: Member, error: BaseException) -> bool:
        """Report whether a call failed because its engine is gone, and mark the engine as failed if so."""
        is_gone = isinstance(error, (openai.APIError, EngineUnavailable)) and is_unavailable(error)
        if is_gone:
            self.pool.failed(member)
        return is_gone

    def abandon(self, url: str, rid: str) -> None:
        """Ask the engine to abort ``rid``. Returns at once."""
        # A rollout's thread may outlive the run.
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.pool.abandon(url, rid), self._loop)

    def _bound(self, options: Any, default_timeout: Any, call: Call, traceparent: str) -> Any:
        url, rid = call
        changed: dict[str, Any] = {
            "url": f"{url}/v1/{options.url.lstrip('/')}",
            "timeout": _at_most(_given(options, default_timeout), self.group.left_s()),
        }
        # Other servers may reject unknown fields.
        if self.target.dialect is not PLAIN and isinstance(options.json_data, dict):
            changed["extra_json"] = self._extra_fields(options, url, rid)
        if self.cap.tokens is not None and is_chat(options):
            given = changed.get("extra_json", options.extra_json or {})
            changed["extra_json"] = {**given, **self.cap.limits(body_of(options))}
        given = headers_of(options) if traceparent else {}
        # A header set by the user's code wins.
        if traceparent and not any(name.lower() == "traceparent" for name in given):
            changed["headers"] = {**given, "traceparent": traceparent}
        return options.model_copy(update=changed)

    def _extra_fields(self, options: Any, url: str, rid: str) -> dict[str, Any]:
        dialect = self.target.dialect
        given = {**dialect.named({}, rid), **(options.extra_json or {})}
        if not is_chat(options):
            return given
        # Without the key, a prompt may hit a cache filled by other weights if an update did not flush it.
        body = dialect.keyed({**options.json_data, **given}, self.pool.cache_keys.of(url))
        if not self.group.captures:
            return body
        is_stream = bool(body.get("stream"))
        if dialect is SGLANG and self.pool.arrays and self.template_at(url) is None:
            body |= self.recorded.asking_rows(body)
            if is_stream and RAW_HEADER in headers_of(options) and ROUTED_START in body:
                body[ROUTED_START] = 0  # such a stream is opened by user code, where a refusal could not be repeated
        return dialect.ask(body, is_stream=is_stream)


async def taken(pool: EnginePool, preferred: str | None, limit_s: float) -> Member:
    """Take an engine for a rollout, waiting up to ``limit_s``. Raises ``EngineWaitOver``."""
    try:
        async with asyncio.timeout(limit_s):
            return await pool.take(preferred)
    except TimeoutError as error:
        raise EngineWaitOver(limit_s) from error


class CallNames:
    """Iterator over the ``rid`` of each call of one attempt. All begin with ``prefix``."""

    def __init__(self, run_id: str, group: OpenGroup, slot: int, attempt: int) -> None:
        self.prefix = attempt_rid_prefix(run_id, group.group_id, slot, attempt)
        self._numbers = itertools.count()

    def __next__(self) -> str:
        return call_rid(self.prefix, next(self._numbers))


def is_chat(options: Any) -> bool:
    """Whether a call of the openai package is a chat."""
    return bool(options.url.endswith(CHAT_PATH))


def body_of(options: Any) -> dict[str, Any]:
    """Return the body of a call of the openai package."""
    given = options.json_data if isinstance(options.json_data, dict) else {}
    return {**given, **(options.extra_json or {})}


def headers_of(options: Any) -> dict[str, Any]:
    """Return the headers that the caller gave to a call of the openai package."""
    return dict(options.headers) if isinstance(options.headers, Mapping) else {}


def _given(options: Any, default_timeout: Any) -> Any:
    """Timeout of a call: seconds, a ``Timeout`` of the openai package, or None."""
    timeout = options.timeout
    is_given = timeout is None or isinstance(timeout, int | float | openai.Timeout)
    return timeout if is_given else default_timeout


def _read_s(given: Any) -> float | None:
    read_s = given.read if isinstance(given, openai.Timeout) else given
    return None if read_s is None else float(read_s)


def _at_most(given: Any, left_s: float) -> openai.Timeout:
    """Limit the timeout ``given`` to ``left_s``."""
    limit_s, read_s = max(left_s, 0.001), _read_s(given)
    read_s = limit_s if read_s is None else min(read_s, limit_s)
    return openai.Timeout(read_s, connect=min(CONNECT_TIMEOUT_S, limit_s))
