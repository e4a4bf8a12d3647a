"""A run whose generator does not know the gateway: records its calls and adds the tokens to its samples."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec

from forebay.core.clock import ActiveClock
from forebay.core.ids import run_rid_prefix
from forebay.engines.capture.turn import Turn
from forebay.engines.pool import EnginePool
from forebay.gateway.request_bodies import Capturing
from forebay.gateway.runs.captured_traces import Calls, CallSpans, CapturedRollout
from forebay.gateway.runs.conversations import RowPrompts, TurnStore, beginnings, digests
from forebay.gateway.runs.run_trace import GatewayTrace
from forebay.gateway.runs.sessions import Affinity, Session, TurnLog

logger = logging.getLogger(__name__)

MAX_AFFINITIES = 10_000
"""Maximum number of prompts whose engine is remembered."""
FIRST_MESSAGES = 2
"""Number of messages that identify a prompt: the first alone is often the same for all."""
END_S = 5.0
"""Seconds after which the calls of a closed group are ended at engines that support no aborts."""
GROUP_CLOSED = "its group is closed"

Json = dict[str, Any]

_decode = msgspec.json.Decoder(Json).decode
_encode = msgspec.json.Encoder().encode


class CapturedSession(Session):
    """The session of a single call, registered with its run while it is in flight."""

    messages: object = None

    def __init__(self, captured: "RunCalls", *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._captured = captured

    def prepared(self, body: Json) -> Json:
        self.messages = body.get("messages")
        self._captured.choose_engine(self)
        return super().prepared(body)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[asyncio.Timeout]:
        self._captured.sessions.add(self)
        try:
            async with super().call() as limit:
                yield limit
        finally:
            self._captured.sessions.discard(self)


class RunCalls:
    """The calls of one run, in flight and recorded. ``counts`` has the number of samples with and without turns."""

    def __init__(
        self, run_id: str, capturing: Capturing, pool: EnginePool, clock: ActiveClock, trace: GatewayTrace
    ) -> None:
        self.capturing = capturing
        self.counts: Counter[str] = Counter(capture_matched=0, capture_unmatched=0)
        self._pool = pool
        self._run_id = run_id
        self._rid_prefix = f"{run_rid_prefix(run_id)}{'c' * 16}-"
        self._numbers = count()
        self._turns = TurnStore(capturing.group_deadline_s)
        self.sessions: set[CapturedSession] = set()
        """Sessions of the calls in flight."""
        # A log lives as long as a call or task that adds to it, so it need not be removed.
        self._logs: WeakSet[TurnLog] = WeakSet()
        self._affinities: OrderedDict[int, Affinity] = OrderedDict()
        self._prompts: RowPrompts | None = None
        self._clock = clock
        self._trace = trace
        self._held: WeakSet[CallSpans] = WeakSet()
        """Spans of calls that are not yet assigned to a sample or to none."""

    async def open(self) -> None:
        """Read the rows, if there is an input file."""
        if self.capturing.input_file:
            try:
                self._prompts = await asyncio.to_thread(RowPrompts, Path(self.capturing.input_file))
            except OSError as error:
                logger.warning("calls cannot be assigned to their rows: %s", error)

    def call(self) -> CapturedSession:
        """Return the session of a new call, which shares no state with earlier calls."""
        name, affinity = f"{next(self._numbers):08x}", Affinity(self._pool)
        prefix, deadline_s = f"{self._rid_prefix}{name}-", self.capturing.group_deadline_s
        trace = self._trace.captured()
        if trace.held is not None:
            self._held.add(trace.held)
        turns = TurnLog(partial(self._record, trace.held))
        self._logs.add(turns)
        return CapturedSession(self, affinity, self._clock, prefix, deadline_s, turns, trace, session_id=name)

    async def drain(self) -> None:
        """Return once all ended calls are recorded."""
        await asyncio.gather(*(turns.drain() for turns in tuple(self._logs)))

    def drop(self) -> None:
        """Stop recording."""
        for turns in tuple(self._logs):
            turns.drop()
        for call in tuple(self._held):
            call.release()

    def completed(self, content: bytes) -> tuple[bytes, CapturedRollout | None]:
        """Return a written sample completed with the token fields of its turns; and its trace, if any turn has one."""
        try:
            sample = _decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return content, None  # the server reports what is wrong
        taken = self._turns.take(sample.get("messages"))
        if sample.get("tokens") is not None:  # the sample has its own tokens: only its timing is taken from the turns
            return content, None if taken is None else self._rollout(sample, taken.calls)
        self.counts["capture_unmatched" if taken is None else "capture_matched"] += 1
        if taken is None:
            return content, None
        # The generator's own fields override the recorded ones.
        return _encode({**taken.fields, **sample}), self._rollout(sample, taken.calls)

    def _rollout(self, sample: Json, calls: Calls) -> CapturedRollout | None:
        with suppress(ValueError):  # the server reports what is wrong with its ids
            return CapturedRollout(self._trace.tracer, sample, calls) if calls else None
        return None

    async def end_group(self, instance_id: str | int) -> None:
        """Abort the calls of a closed group at their engines; they return their tokens so far."""
        prompt = self._prompts.of(instance_id) if self._prompts is not None else None
        if prompt is None:
            return
        ended = [session for session in self.sessions if prompt in beginnings(session.messages)]
        # Marked before the first abort is sent: an aborted call that is not marked would be continued at once.
        for session in ended:
            session.is_given_up = True
        await self._pool.stop(lambda: [request for session in ended for request in session.requests], END_S)
        for session in ended:
            session.close(GROUP_CLOSED)

    def choose_engine(self, session: CapturedSession) -> None:
        """Send calls with the same prompt to the same engine, so that a group shares the engine's cache."""
        messages = session.messages if isinstance(session.messages, list) else []
        *_, prompt = 0, *digests(messages[:FIRST_MESSAGES])
        session.affinity = self._affinities.setdefault(prompt, session.affinity)
        self._affinities.move_to_end(prompt)  # the least recently used is evicted first
        if len(self._affinities) > MAX_AFFINITIES:
            self._affinities.popitem(last=False)

    def _record(self, call: CallSpans | None, turns: Sequence[Turn]) -> None:
        self._pool.notices.note(turns, self._run_id)
        for turn in turns:
            if not turn.is_policys:
                self.counts["capture_other_models"] += 1
            self._turns.add(turn, self._clock.now_s(), call)
