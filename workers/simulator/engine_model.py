"""Model of one engine: sequences share its steps, wait for slots and memory, and are preempted if memory is full."""

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from forebay.engines.abc import EngineLoad
from forebay.workers.simulator.cost import EngineCost

Outcome = Literal["done", "aborted", "lost"]
ALMOST = 1e-6
"""Tolerance in tokens, because clocks are inexact."""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Work of an engine."""

    busy_s: float
    """Seconds in which it sampled or read prompts."""
    sampled: float
    preemptions: int


@dataclass(eq=False, slots=True)
class ModelledCall:
    """One call of an engine. ``ended`` is called once, with its outcome."""

    prompt: int
    wanted: int
    """Tokens that it samples unless it is aborted."""
    limit: int
    """Most tokens that it may sample, as its engine sees it."""
    cached: int
    ended: Callable[[Outcome], None] | None
    group: str = ""
    shared: int = 0
    """Prompt tokens that its group keeps in memory only once; equal for all calls of the group."""
    sampled: int = 0
    num_preemptions: int = 0
    since: float = 0.0
    """Step count of the engine at which it would have begun without preemption."""
    is_running: bool = False

    @property
    def end(self) -> float:
        """Step count of the engine at which it has all its tokens."""
        return self.since + self.wanted


class EngineModel:
    """Gives every running sequence one token a step. The length of a step follows from ``cost``.

    Reading a prompt pauses all sampling. Sequences wait in order of arrival. When memory is full, the sequence that has
    sampled least is preempted, and recomputed once there is room.
    """

    def __init__(self, cost: EngineCost, url: str) -> None:
        self.cost = cost
        self.url = url
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[ModelledCall] = deque()
        self._running: dict[ModelledCall, None] = {}
        self._ends: list[tuple[float, int, ModelledCall]] = []
        """A heap. Entries of preempted or ended sequences are discarded when they reach the top."""
        self._siblings: dict[str, int] = {}
        """Number of running sequences of each group."""
        self._num_entered = 0
        self._steps = 0.0
        self._at_s = 0.0
        """Time for which ``_steps`` is correct; in the future while prompts are read."""
        self._timer: asyncio.TimerHandle | None = None
        self._prompts = 0.0
        """Tokens in memory of the ``n`` running sequences, minus ``n * steps``."""
        self._limits = 0.0
        """Tokens that these may still sample, plus ``n * steps``."""
        self._seen: OrderedDict[str, None] = OrderedDict()
        """Prompts in its cache, the most recently used last."""
        self._busy_s = self._sampled = 0.0
        self._num_preemptions = 0

    @property
    def load(self) -> EngineLoad:
        """Load that the engine would report."""
        return EngineLoad(len(self._running), len(self._waiting))

    @property
    def use(self) -> EngineUse:
        """Work of the engine so far."""
        return EngineUse(self._busy_s, self._sampled, self._num_preemptions)

    # --- calls

    def cached_of(self, key: str, prompt: int) -> int:
        """Cached tokens of a prompt. Adds the prompt to the cache."""
        is_seen = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > 4 * self.cost.places:
            self._seen.popitem(last=False)
        return int(prompt * min(1.0, self.cost.cached_share)) if is_seen else 0

    def shared_of(self, prompt: int) -> int:
        """Prompt tokens that siblings share in memory."""
        return int(prompt * min(1.0, self.cost.shared_share))

    def submit(self, sequence: ModelledCall) -> None:
        """Start or queue a call."""
        if self.cost.kv_tokens is not None:  # the memory also limits its tokens
            room = max(1, self.cost.kv_tokens - sequence.prompt - 1)
            sequence.wanted, sequence.limit = min(sequence.wanted, room), min(sequence.limit, room)
        self._waiting.append(sequence)
        self._update()

    def abort(self, sequence: ModelledCall) -> None:
        """End a call with the tokens it has. Does nothing if it has ended."""
        if sequence.ended is None:
            return
        self._advance()
        self._finish(sequence, "aborted")
        self._update()

    def fail(self) -> None:
        """Fail: all calls are lost, and the cache is empty."""
        self._advance()
        for sequence in [*self._running, *self._waiting]:
            self._finish(sequence, "lost")
        self.forget_prompts()
        self._update()

    def forget_prompts(self) -> None:
        """Empty the cache."""
        self._seen.clear()

    # --- its steps

    def _update(self) -> None:
        self._advance()
        self._end_due()
        self._make_room()
        self._admit()
        self._set_timer()

    def _advance(self) -> None:
        """Advance the step count to the current time."""
        lasted = self._loop.time() - self._at_s
        if lasted <= 0:
            return
        self._at_s += lasted
        if num := len(self._running):
            steps = lasted * self.cost.tokens_per_s(num)
            self._steps += steps
            self._sampled += num * steps
            self._busy_s += lasted

    def _end_due(self) -> None:
        while (first := self._first()) is not None and first.end <= self._steps + ALMOST:
            self._finish(first, "done")

    def _first(self) -> ModelledCall | None:
        """The running sequence that ends first."""
        while self._ends:
            end, _, sequence = self._ends[0]
            if sequence.is_running and end == sequence.end:
                return sequence
            heapq.heappop(self._ends)
        return None

    def _finish(self, sequence: ModelledCall, outcome: Outcome) -> None:
        if sequence.is_running:
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
        if outcome == "done":
            sequence.sampled = sequence.wanted
        ended, sequence.ended = sequence.ended, None
        if ended is not None:
            ended(outcome)

    def _start(self, sequence: ModelledCall) -> None:
        self._num_entered += 1
        uncached = sequence.prompt + sequence.sampled - (0 if sequence.num_preemptions else sequence.cached)
        reading_s = self.cost.prefill_s(uncached)
        self._at_s += reading_s
        self._busy_s += reading_s
        sequence.since, sequence.is_running = self._steps - sequence.sampled, True
        self._running[sequence] = None
        self._prompts += self._own_prompt(sequence) - sequence.since
        self._siblings[sequence.group] = self._siblings.get(sequence.group, 0) + 1
        self._limits += sequence.limit + sequence.since
        heapq.heappush(self._ends, (sequence.end, self._num_entered, sequence))

    def _stop(self, sequence: ModelledCall) -> None:
        del self._running[sequence]
        self._siblings[sequence.group] -= 1
        if not self._siblings[sequence.group]:
            del self._siblings[sequence.group]
        self._prompts -= self._own_prompt(sequence) - sequence.since
        self._limits -= sequence.limit + sequence.since
        sequence.is_running = False
        sequence.sampled = min(sequence.wanted, int(self._steps - sequence.since + ALMOST))
        if not self._running:
            self._prompts = self._limits = 0.0  # clears rounding errors

    def _own_prompt(self, sequence: ModelledCall) -> int:
        """Prompt tokens in memory that no other running sequence shares."""
        return sequence.prompt - (sequence.shared if sequence.group in self._siblings else 0)

    # --- slots and memory

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.cost.places and self._has_memory(self._waiting[0]):
            self._start(self._waiting.popleft())

    def _has_memory(self, sequence: ModelledCall) -> bool:
        kv_tokens, num = self.cost.kv_tokens, len(self._running)
        if kv_tokens is None or not num:
            return True
        steps = num * self._steps
        reserve = self.cost.kv_reserve * (max(0.0, self._limits - steps) + sequence.limit - sequence.sampled) + num + 1
        return self._prompts + steps + self._own_prompt(sequence) + sequence.sampled + reserve <= kv_tokens

    def _make_room(self) -> None:
        kv_tokens = self.cost.kv_tokens
        if kv_tokens is None:
            return
        while (num := len(self._running)) > 1 and self._prompts + num * self._steps + ALMOST >= kv_tokens:
            last = max(self._running, key=lambda each: (each.since, each.prompt))  # it has sampled least
            self._stop(last)
            last.num_preemptions += 1
            self._num_preemptions += 1
            self._waiting.appendleft(last)

    def _set_timer(self) -> None:
        first = self._first()
        if first is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        num = len(self._running)
        steps = first.end - self._steps
        if self.cost.kv_tokens is not None and num > 1:
            steps = min(steps, (self.cost.kv_tokens - self._prompts) / num - self._steps)
        due_s = self._at_s + max(0.0, steps) / self.cost.tokens_per_s(num)
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return  # it fires early, finds nothing due, and is set again
            self._timer.cancel()
        self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._update()
