"""The baseline policy: binds each rollout to an engine, in turn, when its group is submitted."""

from collections.abc import Iterable

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.waiting_groups import WaitingGroups


class Static:
    """Runs rollout k on engine k modulo the number of engines. It waits for that engine even while others are free."""

    concurrency = 1.0

    def __init__(self, inputs: PolicyInputs) -> None:
        self._waiting = WaitingGroups(inputs.window)
        self._num_submitted = 0
        self._rollouts: dict[str, dict[int, int]] = {}
        """The k of each rollout that has not ended, by group and number."""
        self._to_start: dict[int, RolloutKey] = {}
        """Waiting rollouts of started groups, by k."""

    def room(self) -> int:
        """Number of further groups it accepts. Implements ``Policy``, like all methods below."""
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
            overdue = self._waiting.overdue  # no other group may overtake it
            for group in self._waiting if overdue is None else (overdue,):
                k = _first_startable(self._rollouts[group.group].values(), loads)
                if k is not None:
                    self._begin(self._waiting.begin(group.group))
                    break
        return None if k is None else NextRollout(self._to_start.pop(k), loads.urls[k % len(loads.urls)])

    def _begin(self, group: WaitingGroup) -> None:
        for number in group.numbers:
            self.lost(RolloutKey(group.group, number))

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:  # noqa: ARG002 - its length does not matter
        rollouts = self._rollouts.get(rollout.group, {})
        rollouts.pop(rollout.number, None)
        if not rollouts:
            self._rollouts.pop(rollout.group, None)

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - this policy sets no cap
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
        """Do nothing: `next` maps waiting rollouts to the engines that answer."""

    def begin_step(self, number: int) -> None:
        """Do nothing: steps do not affect the policy."""


def _first_startable(rollouts: Iterable[int], loads: EngineLoads) -> int | None:
    """The first rollout whose engine has fewer rollouts than its slots."""
    for k in rollouts if loads.urls else ():
        url = loads.urls[k % len(loads.urls)]
        if loads.in_flight(url) < loads.places(url):
            return k
    return None
