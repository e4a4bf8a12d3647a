"""The generation thread: admits calls between steps, decodes all rows together, and sends pieces to the loop."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from forebay.core.errors import EngineError, EngineUnavailable
from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.backend import FIRST_VERSION
from forebay.engines.fake_sglang.calls import Milestones, Piece, PromptCall
from forebay.engines.tiny.backlog import Backlog
from forebay.engines.tiny.batch import Prefill, PrefillCache, RunningBatch, pick_tokens
from forebay.engines.tiny.extra import require, torch_threads
from forebay.engines.tiny.model import LoadedModel, take_weights
from forebay.engines.tiny.rows import ChoiceRow

logger = logging.getLogger(__name__)

MAX_KEPT_TOKENS = 16_384
"""Maximum prompt tokens with a kept cache: the samples of a group use the same prompt, each in its own call."""

STOP_TIMEOUT_S = 10.0

WINDOW_S = 1.0
"""Seconds of the window in which throughput is measured; the last complete window is reported."""

Outbox = list[tuple[PromptCall, "Piece | Exception"]]


@dataclass(frozen=True, slots=True)
class CurrentWeights:
    """The current weights: the folder they were loaded from, and the trainer's name for them."""

    path: Path
    version: str = FIRST_VERSION


@dataclass(slots=True)
class Load:
    """The load of the thread, and totals since its start. The event loop reads each number separately."""

    max_rows: int
    max_tokens: int
    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    """Tokens in the cache."""
    tokens_per_s: float = 0.0
    num_prefilled: int = 0
    num_reused: int = 0
    """Prompt tokens that were reused from the cache."""
    prefill_s: float = 0.0
    window_start_s: float = 0.0
    num_in_window: int = 0

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self.num_in_window += num_tokens
        elapsed_s = time.monotonic() - self.window_start_s
        if elapsed_s >= WINDOW_S:
            self.begin_window(self.num_in_window / elapsed_s)

    def begin_window(self, tokens_per_s: float) -> None:
        """Start a new window; ``tokens_per_s`` is the throughput to report until it ends."""
        self.tokens_per_s, self.window_start_s, self.num_in_window = tokens_per_s, time.monotonic(), 0


class GenerationThread:
    """Generates for all calls on its own thread. Call its methods on the event loop that started it."""

    def __init__(self, model: LoadedModel, *, threads: int = 1, max_rows: int = 64) -> None:
        self.load = Load(max_rows, max_rows * model.context_length)
        self.weights = CurrentWeights(model.path)
        self._model = model
        self._threads = threads
        self._batch: RunningBatch[ChoiceRow] = RunningBatch(model)
        self._prefills = PrefillCache(MAX_KEPT_TOKENS)
        self._backlog = Backlog()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tiny-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the thread answers calls."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Start generating for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every call with its tokens so far (finish reason ``abort``) and stop the thread."""
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def submit(self, call: PromptCall) -> None:
        """Queue a call; its pieces follow. Raises ``EngineUnavailable`` once stopped."""
        if not self.is_alive:
            raise EngineUnavailable("the engine is stopping", status_code=503)
        self._inbox.put(partial(self._backlog.add, call))

    def abort(self, rid_prefix: str) -> None:
        """End calls by a prefix of their ``rid`` within a step, including queued ones; they keep their partial text.

        As in SGLang, calls paused in place end after the pause, and calls that arrived during a pause are missed.
        """
        self._inbox.put(partial(self._abort, lambda call: call.rid.startswith(rid_prefix)))

    def abort_all(self) -> None:
        """End every call within a step."""
        self._inbox.put(partial(self._abort, lambda _: True))

    def cancel(self, call: PromptCall) -> None:
        """End this call within a step, because its client is gone."""
        self._inbox.put(partial(self._cancel, call))

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation; returns between two steps. Calls that arrive meanwhile wait and count in no load.

        ``abort`` ends the calls in flight. ``retract`` removes them from the batch and drops their cache, which is
        recomputed with the weights in use at the resume. ``in_place`` keeps them with their cache.
        """
        await self._between_steps(partial(self._pause, mode))

    async def resume(self) -> None:
        """Resume after a pause."""
        await self._between_steps(self._resume)

    async def forget_prompts(self) -> None:
        """Clear the prompt cache."""
        await self._between_steps(self._prefills.clear)

    async def update_weights(self, path: Path, version: str | None, *, flushes_cache: bool = True) -> None:
        """Load the weights in the folder ``path`` between two steps; without a version they keep the previous name.

        Calls in flight continue with them after their tokens so far. As in SGLang, cached prompts of the old weights
        stay in their namespaces unless the update ``flushes_cache``. Raises ``InvalidInput`` if the folder does not
        fit, ``EngineUnavailable`` once stopped.
        """
        await self._between_steps(partial(self._update, path, version, flushes_cache))

    async def name_weights(self, version: str) -> None:
        """Rename the weights to ``version`` from the next token on."""
        await self._between_steps(partial(self._name, version))

    async def _between_steps(self, act: Callable[[], None]) -> None:
        if not self.is_alive:
            raise EngineUnavailable("the engine is stopping", status_code=503)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(self._act, act, done))
        await done

    # The methods below run on the thread.

    def _run(self) -> None:
        torch = require("torch")
        with torch_threads(self._threads), torch.inference_mode():
            while not self._stopping:
                self._take_messages()
                self._turn()

    def _take_messages(self) -> None:
        # Otherwise an idle engine would report the throughput of its last window forever.
        if not self._batch.rows and not self._backlog:
            self.load.begin_window(0.0)
        # Nothing to generate: sleep until a message arrives, since only a message can change that.
        if not self._can_advance:
            self._inbox.get()()
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            message()

    @property
    def _can_advance(self) -> bool:
        return self._backlog.mode is None and bool(self._batch.rows or self._backlog)

    def _turn(self) -> None:
        try:
            if self._can_advance:
                self._advance()
        except Exception as error:  # whatever a step failed of (out of memory, a wrong model), answer its calls
            logger.exception("a generation step failed")
            self._fail_all(error)
        self._count_load()

    def _count_load(self) -> None:
        self.load.num_running, self.load.num_waiting = len(self._batch.rows), self._backlog.num_choices
        self.load.num_tokens = self._batch.num_tokens

    def _advance(self) -> None:
        # Decode running rows before reading new ones: `_pick` needs the logits of both in the order of the rows.
        decoded = self._batch.step([row.last_token for row in self._batch.rows]) if self._batch.rows else None
        added = self._admit()
        rows = self._batch.rows
        if rows:
            self._pick(rows, decoded, added)
            self.load.generated(len(rows))
        self._send_pieces()

    def _pick(self, rows: list[ChoiceRow], decoded: Any, added: list[tuple[ChoiceRow, Prefill]]) -> None:
        parts = [] if decoded is None else [decoded]
        picked = pick_tokens(
            require("torch").cat(parts + [prefill.logits[None] for _, prefill in added]),
            [row.call.params for row in rows],
            [row.dice for row in rows],
            [row.call.num_top_logprobs for row in rows],
        )
        for row, token in zip(rows, picked, strict=True):
            row.accept(token, self._model.eos_token_ids, self.weights.version)

    def _admit(self) -> list[tuple[ChoiceRow, Prefill]]:
        """Join what fits now: retracted rows, then calls, whose choices enter together."""
        calls = self._backlog.fitting(self.load.max_rows - len(self._batch.rows))
        added = [(row, self._batch.prefill(row.token_ids)) for row in self._backlog.retracted]
        unsampled: Outbox = []
        for call in calls:
            begun_s = time.monotonic()
            prefill, num_cached = self._prefill(call)
            if call.params.max_tokens == 0:
                now_s = time.monotonic()
                unsampled += _ended(call, "length", Milestones(begun_s, now_s, now_s, num_cached))
            else:
                begun = Milestones(begun_s, cached_tokens=num_cached)
                added += [(ChoiceRow(call, index, self._model.tokenizer, begun), prefill) for index in call.indices]
        self._batch.join(added)
        # Only now, so that after a failed step every call is either waiting or in the batch.
        self._backlog.admitted(len(calls))
        self._send(unsampled)
        return added

    def _prefill(self, call: PromptCall) -> tuple[Prefill, int]:
        """Return the prompt's prefill, and how many of its tokens were cached."""
        # A prompt to be scored is read again, because the logits of its own tokens are not kept.
        key = (call.extra_key, call.prompt_ids)
        kept = self._prefills.get(key)
        if kept is not None and call.logprob_start is None:
            self.load.num_reused += len(call.prompt_ids)
            return kept, len(call.prompt_ids)
        begun_s = time.monotonic()
        if call.logprob_start is None:
            prefill = self._prefills.put(key, self._batch.prefill(call.prompt_ids))
        else:
            prefill, call.prompt_logprobs = self._batch.scored_prefill(call.prompt_ids, call.logprob_start)
        self.load.num_prefilled += len(call.prompt_ids)
        self.load.prefill_s += time.monotonic() - begun_s
        return prefill, 0

    def _act(self, act: Callable[[], None], done: "asyncio.Future[None]") -> None:
        error: Exception | None = None
        try:
            act()
        except Exception as failed:  # noqa: BLE001 - raised in the caller; the thread must serve other calls
            error = failed
        # Before the answer: a caller that pauses the engine and then reads its load must see the calls gone.
        self._count_load()
        self._in_loop(_resolve, done, error)

    def _update(self, path: Path, version: str | None, flushes_cache: bool) -> None:
        take_weights(self._model, path)
        # Rows in flight always keep their cache.
        if flushes_cache:
            self._prefills.clear()
        self.weights = CurrentWeights(path, version or self.weights.version)

    def _name(self, version: str) -> None:
        self.weights = CurrentWeights(self.weights.path, version)

    def _pause(self, mode: PauseMode) -> None:
        self._send_pieces()  # rows that were aborted during an earlier pause in place
        self._backlog.mode = mode
        if mode == "abort":
            self._abort(lambda _: True)
        elif mode == "retract":
            self._backlog.retracted += self._batch.rows
            for row in self._batch.rows:
                row.num_retractions += 1
            self._batch.keep([])

    def _resume(self) -> None:
        self._backlog.resume()
        self._send_pieces()

    def _send_pieces(self) -> None:
        rows = self._batch.rows
        self._send([(row.call, piece) for row in rows if (piece := row.take_piece()) is not None])
        kept = [at for at, row in enumerate(rows) if row.finish_reason is None]
        if len(kept) < len(rows):
            self._batch.keep(kept)

    def _abort(self, matches: Callable[[PromptCall], bool]) -> None:
        self._end_queued(self._backlog.drop(matches))
        taken_out = self._backlog.drop_retracted(matches)
        for row in [*taken_out, *(row for row in self._batch.rows if matches(row.call))]:
            row.finish("abort")
        self._send([(row.call, piece) for row in taken_out if (piece := row.take_piece()) is not None])
        # As in SGLang, rows paused in place are answered once generation resumes.
        if self._backlog.mode != "in_place":
            self._send_pieces()

    def _end_queued(self, calls: list[PromptCall]) -> None:
        ended = Milestones(ended_s=time.monotonic())
        self._send([piece for call in calls for piece in _ended(call, "abort", ended)])

    def _cancel(self, call: PromptCall) -> None:
        # The client is gone, so the call ends at once, even if a pause set it aside, where an abort by id misses it.
        self._end_queued(self._backlog.drop_set_aside(lambda other: other is call))
        self._abort(lambda other: other is call)

    def _stop(self) -> None:
        self._stopping = True
        # Leave any pause first: calls that it set aside must also be answered.
        self._backlog.resume()
        self._abort(lambda _: True)

    def _fail_all(self, error: Exception) -> None:
        calls = {row.call for row in self._batch.rows} | self._backlog.clear()
        self._batch.keep([])
        failure = EngineError(f"generation failed: {error}", status_code=500)
        self._send([(call, failure) for call in calls])

    def _send(self, outbox: Outbox) -> None:
        if outbox:
            self._in_loop(_deliver, outbox)

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        # A closed loop has no callers left to answer.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _ended(call: PromptCall, reason: str, milestones: Milestones) -> Outbox:
    """Return the pieces of a call that ends without a token."""
    return [(call, Piece(index, finish_reason=reason, milestones=milestones)) for index in call.indices]


def _deliver(outbox: Outbox) -> None:
    for call, piece in outbox:
        call.pieces.put_nowait(piece)


def _resolve(done: "asyncio.Future[None]", error: Exception | None) -> None:
    if done.done():  # the caller was cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
