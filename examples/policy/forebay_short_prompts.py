"""A policy that begins with the groups that have the shortest prompts, on the least loaded engine."""

import heapq

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup


class ShortPrompts:
    """Chooses among ``window`` groups. The oldest is begun at the latest after ``window`` others."""

    concurrency = 1.0

    def __init__(self, inputs: PolicyInputs) -> None:
        is_reversed = inputs.settings.options.get("is_reversed", False)
        if not isinstance(is_reversed, bool):
            raise InvalidInput("is_reversed must be true or false", field="scheduler.options.is_reversed")
        self._sign = -1 if is_reversed else 1
        self._window = inputs.window
        self._waiting: dict[str, WaitingGroup] = {}
        self._by_prompt: list[tuple[int, int, str]] = []  # a heap; groups that no longer wait are dropped when popped
        self._num_submitted = self._num_passes = 0
        self._ready: list[RolloutKey] = []  # rollouts of begun groups, the next one last

    def room(self) -> int:
        return max(0, self._window - len(self._waiting))

    def submit(self, group: WaitingGroup) -> None:
        if group.is_open:
            self._begin(group)
            return
        self._num_submitted += 1
        self._waiting[group.group] = group
        heapq.heappush(self._by_prompt, (self._sign * group.num_chars, self._num_submitted, group.group))

    def next(self, loads: EngineLoads) -> NextRollout | None:
        if not self._ready and self._waiting and loads.may_begin:
            self._begin(self._waiting.pop(self._chosen()))
        return NextRollout(self._ready.pop(), loads.least()) if self._ready else None

    def _chosen(self) -> str:
        oldest = next(iter(self._waiting))
        if self._num_passes >= self._window:
            self._num_passes = 0
            return oldest
        while (group := heapq.heappop(self._by_prompt)[2]) not in self._waiting:
            pass
        self._num_passes = 0 if group == oldest else self._num_passes + 1
        return group

    def _begin(self, group: WaitingGroup) -> None:
        self._ready += [RolloutKey(group.group, number) for number in reversed(group.numbers)]

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:
        pass  # a policy that learns looks at end.tokens and end.seconds

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - no cap is given here
        self._ready.append(rollout)

    def lost(self, rollout: RolloutKey) -> None:
        self._ready.append(rollout)

    def closed(self, group: str) -> None:
        self._waiting.pop(group, None)
        self._ready = [rollout for rollout in self._ready if rollout.group != group]

    def engine_lost(self, url: str) -> None:
        pass  # this policy binds no rollout to an engine

    def begin_step(self, number: int) -> None:
        pass
