"""The baseline: each rollout is bound to an engine when its group is submitted, the engines in turn."""

from collections.abc import Iterable

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.waiting_groups import WaitingGroups


class Static:
    """Rollout k runs on engine k modulo the number of engines, and waits for it even while others are free."""

    concurrency = 1.0

    def __init__(self, inputs: PolicyInputs) -> None:
        self._waiting = WaitingGroups(inputs.window)
        self._num_submitted = 0
        self._rollouts: dict[str, dict[int, int]] = {}
        """By group, then by number: the k of each rollout that has not ended."""
        self._to_start: dict[int, RolloutKey] = {}
        """By k: rollouts that wait, of groups that have begun."""

    def room(self) -> int:
        """Of ``Policy``, as all below."""
        return self._waiting.room

    def submit(self, group: WaitingGroup) -> None:
        self._rollouts[group.group] = {number: self._num_submitted + at for at, number in enumerate(group.numbers)}
        self._num_submitted += len(group.numbers)
        if group.is_open:
            self._begin(group)
        else:
            self._waiting.submit(group)

    def next(self, loads: EngineLoads) -> NextRollout | None:
        k = _first_startable(self._to_start, loads)
        if k is None and loads.may_begin:
            overdue = self._waiting.overdue  # no other group may pass it
            for group in self._waiting if overdue is None else (overdue,):
                k = _first_startable(self._rollouts[group.group].values(), loads)
                if k is not None:
                    self._begin(self._waiting.begin(group.group))
                    break
        return None if k is None else NextRollout(self._to_start.pop(k), loads.urls[k % len(loads.urls)])

    def _begin(self, group: WaitingGroup) -> None:
        for number in group.numbers:
            self.lost(RolloutKey(group.group, number))

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:  # noqa: ARG002 - how long it took changes nothing
        rollouts = self._rollouts.get(rollout.group, {})
        rollouts.pop(rollout.number, None)
        if not rollouts:
            self._rollouts.pop(rollout.group, None)

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - none has a cap here
        self.lost(rollout)

    def lost(self, rollout: RolloutKey) -> None:
        k = self._rollouts.get(rollout.group, {}).get(rollout.number)
        if k is not None:
            self._to_start[k] = rollout

    def closed(self, group: str) -> None:
        self._waiting.drop(group)
        for k in self._rollouts.pop(group, {}).values():
            self._to_start.pop(k, None)

    def engine_lost(self, url: str) -> None:
        """What waits is bound to the engines that answer whenever one of them has room."""

    def begin_step(self, number: int) -> None:
        """Steps make no difference."""


def _first_startable(rollouts: Iterable[int], loads: EngineLoads) -> int | None:
    """The first rollout whose engine has fewer rollouts than its share of the places."""
    for k in rollouts if loads.urls else ():
        url = loads.urls[k % len(loads.urls)]
        if loads.in_flight(url) < loads.places(url):
            return k
    return None
