"""The choices that a scripted engine works on: asks the script, and emits, aborts and pauses its answers."""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from forebay.core.errors import EngineError, InvalidInput
from forebay.core.waiting import Signal
from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.calls import JSONObject, PromptCall
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody, WeightsBody
from forebay.engines.scripted.play import ScriptedWeights, first_of, play
from forebay.engines.scripted.script import REASONING_PARSER, TOOL_CALL_PARSER, Reply, Script, ScriptedCall
from forebay.engines.scripted.tokens import VOCABULARY_SIZE, decode, encode, encode_chat, logprob, open_chat

logger = logging.getLogger(__name__)


class ScriptedBackend:
    """Back end of the HTTP interface: all requested choices, those in progress, and the weights."""

    context_length = 2**20
    vocabulary_size = VOCABULARY_SIZE
    max_choices = 2**10
    is_alive = True

    def __init__(
        self,
        script: Script,
        name: str,
        *,
        has_parsers: bool = True,
        has_metrics: bool = True,
        max_running: int | None = None,
    ) -> None:
        self.name = name
        self._max_running = max_running
        self.has_metrics = has_metrics
        self.started_with: JSONObject = {}
        self.tells_textless_logprobs = has_parsers
        self.calls: list[ScriptedCall] = []
        self.aborts: list[str] = []
        self.weight_updates: list[dict[str, Any]] = []
        self.max_in_flight = 0
        self.weights = ScriptedWeights()
        self._script = script
        self._tasks: dict[PromptCall, list[tuple[ScriptedCall, asyncio.Task[None]]]] = {}
        self._running: set[ScriptedCall] = set()
        self._queued: set[ScriptedCall] = set()
        """Running choices that wait: for a free slot, or for the ``queue_s`` of their reply."""
        self._changed = Signal()
        self._is_stopping = False

    def open(self) -> None:
        """Prepare for serving, with the initial weights."""
        self.weights = ScriptedWeights()
        self._is_stopping = False

    def stop_all(self) -> None:
        """Abort every running call, including paused ones."""
        self._is_stopping = True
        # Calls blocked by a pause are not running yet: once resumed, they start and see `_is_stopping`.
        self.weights.resume()
        _abort(self._running)

    @property
    def in_flight(self) -> int:
        """Number of choices in progress."""
        return len(self._running)

    @property
    def weight_version(self) -> str:
        """Current name of the weights."""
        return self.weights.version

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        """Return once ``holds()`` is true, checked whenever a call begins or ends. Raises ``TimeoutError``."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                await self._changed.wait()

    def refuse_unserved(self, body: ChatBody | GenerateBody) -> None:
        """Accept everything: a script can be asked for anything."""

    async def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""
        return encode(text)

    async def encode_chat(
        self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, is_continued: bool
    ) -> Sequence[int]:
        """Return the tokens of a chat's prompt. Raises ``InvalidInput``."""
        try:
            return encode_chat(messages, tools, is_continued=is_continued)
        except (LookupError, TypeError, AttributeError) as error:  # a real chat template fails in the same way
            raise InvalidInput(f"these messages cannot be rendered: {error!r}", field="messages") from None

    async def decode(self, tokens: Sequence[int], *, with_marks: bool) -> str:
        """Return the text of tokens."""
        return decode(tokens, with_marks=with_marks)

    def token_text(self, token: int) -> str:
        """Return the text of one token."""
        return decode([token])

    def submit(self, call: PromptCall) -> None:
        """Start answering the choices of a call."""
        choices = [_scripted_call(call, index) for index in call.indices]
        for choice in choices:
            if choice.is_asked:
                choice.number = len(self.calls)
                self.calls.append(choice)
        self._tasks[call] = [(choice, asyncio.create_task(self._answer(call, choice))) for choice in choices]
        # Notify last: a waiter for this call must find it in flight.
        self._changed.notify()

    def cancel(self, call: PromptCall) -> None:
        """Cancel the running choices of a call."""
        for choice, task in self._tasks.pop(call, ()):
            # Every call is cancelled at its end; a finished choice keeps its finish reason.
            task.cancel()
            choice.finished = choice.finished or "disconnected"

    def abort(self, rid_prefix: str) -> None:
        """Abort calls whose id begins with the prefix; "" matches all."""
        self.aborts.append(rid_prefix)
        _abort(choice for choice in self._running if (choice.rid or "").startswith(rid_prefix))

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation; ``abort`` also ends running calls and returns once they are gone."""
        self.weights.pause(mode)
        if mode == "abort":
            self.abort("")
            await self.wait_until(lambda: not self._running, None)

    async def resume(self) -> None:
        """Resume after a pause."""
        self.weights.resume()

    async def update_weights(self, body: WeightsBody) -> None:
        """Set new weights: at once while paused, otherwise, as in SGLang, once no call is running."""
        if self.weights.mode is None:
            await self.wait_until(lambda: not self._running, None)
        self.weights.version = body.weight_version or self.weights.version
        self.weight_updates.append(body.given)

    async def name_weights(self, version: str) -> None:
        """Rename the weights."""
        self.weights.version = version

    async def flush_cache(self) -> None:
        """Do nothing: the scripted engine has no cache."""

    def model_info(self) -> JSONObject:
        """Return the model, the folder of its weights, and its parsers."""
        path = self.weight_updates[-1]["model_path"] if self.weight_updates else self.name
        parsers = {"reasoning_parser": REASONING_PARSER, "tool_call_parser": TOOL_CALL_PARSER}
        return {"model_path": path} | (parsers if self.tells_textless_logprobs else dict.fromkeys(parsers))

    def server_info(self) -> JSONObject:
        """Return the start options to report."""
        return self.started_with

    def load(self) -> JSONObject:
        """Return the number of choices in progress and in the queue."""
        num_queued = len(self._queued)
        return {"num_running_reqs": self.in_flight - num_queued, "num_waiting_reqs": num_queued}

    async def _answer(self, call: PromptCall, choice: ScriptedCall) -> None:
        # Like SGLang, admit nothing while paused: such a call counts in no load, and aborts miss it.
        await self.weights.opened()
        if self._is_stopping:
            choice.aborted.set()
        self._running.add(choice)
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self._changed.notify()
        failure: Exception | None = None
        try:
            await self._place(choice)
            await self._say(call, choice)
            if choice.reply.error_status is not None:
                failure = EngineError(choice.reply.text, status_code=choice.reply.error_status)
        except Exception as error:  # noqa: BLE001 - otherwise the client of a failed reply would wait forever
            failure = error
        finally:
            self._running.discard(choice)
            self._changed.notify()
        # Last, so that a client with a complete reply no longer finds the choice in the load.
        choice.finished = "error" if failure else choice.finished
        choice.milestones = replace(choice.milestones, ended_s=time.monotonic())
        call.pieces.put_nowait(failure or choice.next_piece())

    async def _place(self, choice: ScriptedCall) -> None:
        """Return once fewer than ``max_running`` choices run; first come, first served."""
        if not self._is_full():
            return
        self._queued.add(choice)
        stopped = asyncio.create_task(choice.aborted.wait())
        stopped.add_done_callback(lambda _: self._changed.notify())
        try:
            while not choice.aborted.is_set() and self._is_full():
                await self._changed.wait()
        finally:
            stopped.cancel()
            self._queued.discard(choice)

    def _is_full(self) -> bool:
        return self._max_running is not None and self.in_flight - len(self._queued) >= self._max_running

    async def _say(self, call: PromptCall, choice: ScriptedCall) -> None:
        version = choice.asked_version = self.weights.version
        # The script's own time counts as time in which the engine works on the call.
        choice.milestones = replace(choice.milestones, begun_s=time.monotonic())
        if call.logprob_start is not None:
            asked = call.prompt_ids[call.logprob_start :]
            call.prompt_logprobs = tuple(logprob(*pair, version) for pair in pairwise(asked))
        asking = asyncio.create_task(self._ask(choice))
        stopped = asyncio.create_task(choice.aborted.wait())
        try:
            await asyncio.wait({asking, stopped}, return_when=asyncio.FIRST_COMPLETED)
            # Aborted before the script answered: the reply is empty.
            choice.reply = asking.result() if asking.done() else Reply()
        finally:
            asking.cancel()
            stopped.cancel()
        if choice.reply.error_status is not None:
            await first_of([choice.aborted], choice.reply.delay_s)
            return
        await self._prepare(choice)
        await play(choice, self.weights, lambda: call.pieces.put_nowait(choice.next_piece()))

    async def _prepare(self, choice: ScriptedCall) -> None:
        """Wait for the reply's queue and prefill times; an abort ends the wait."""
        reply, reached = choice.reply, choice.milestones
        if reply.queue_s:
            self._queued.add(choice)
            try:
                await first_of([choice.aborted], reply.queue_s)
            finally:
                self._queued.discard(choice)
            reached = replace(reached, begun_s=None if choice.aborted.is_set() else time.monotonic())
        if reply.prefill_s:
            await first_of([choice.aborted], reply.prefill_s)
        if not choice.aborted.is_set():
            reached = replace(reached, prefilled_s=time.monotonic(), cached_tokens=reply.cached_tokens)
        choice.milestones = reached

    async def _ask(self, choice: ScriptedCall) -> Reply:
        if not choice.is_asked:
            # Prefills follow a call with the same prompt, which is in the cache then.
            return Reply(finish_reason="length", cached_tokens=max(0, len(choice.prompt_ids) - 1))
        try:
            answer = self._script(choice)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:  # the script is user code: its error becomes the answer
            logger.warning("the script raised on call %d", choice.number, exc_info=True)
            return Reply(text=f"the script raised {error!r}", error_status=500)
        return Reply(text=answer) if isinstance(answer, str) else answer


def _scripted_call(call: PromptCall, index: int) -> ScriptedCall:
    prompt_ids = list(call.prompt_ids)
    messages, said = open_chat(prompt_ids) or (None, "")
    traceparent = call.traceparent
    if call.is_chat:
        return ScriptedCall(index, call.body, prompt_ids, said=said, traceparent=traceparent)
    body, is_asked = {**call.body, "messages": messages or []}, messages is not None
    return ScriptedCall(index, body, prompt_ids, said=said, is_asked=is_asked, is_chat=False, traceparent=traceparent)


def _abort(calls: Iterable[ScriptedCall]) -> None:
    for call in calls:
        call.aborted.set()
