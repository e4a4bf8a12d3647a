"""Long answers first, so that the last ones to end are short ones."""

import math

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.lengths import LengthPredictor
from forebay.workers.scheduling.predicted_order import PredictedOrder
from forebay.workers.scheduling.started_groups import StartedGroup, StartedGroups
from forebay.workers.scheduling.waiting_groups import WaitingGroups

LEAVES_FOR = math.log(1.25)
"""By how much a group that waits must be longer than one that has begun, to be begun before the rest of that."""


class LongestFirst:
    """The next rollout is of the group with the longest predicted answers.

    A group that has begun goes on before one that waits, unless that is predicted to be a quarter longer: a trainer
    gets whole groups, and predictions are not worth more. No group is left for more than ``window`` later ones,
    whether it waits or has begun. Engines are chosen as by ``pull``.
    """

    concurrency = 1.0

    def __init__(self, inputs: PolicyInputs) -> None:
        self._affinity, self._window = inputs.settings.affinity, inputs.window
        self._predictor = LengthPredictor()
        for past in inputs.history:
            self._predictor.add(past.instance_id, past.tokens)
        self._waiting = WaitingGroups(inputs.window)
        self._order = PredictedOrder(self._predictor)
        self._started = StartedGroups(lambda started: -self._prediction(started.group))
        self._begun: dict[str, WaitingGroup] = {}
        """Those of which something may still end, however little is left to start."""

    def room(self) -> int:
        """Of ``Policy``, as all below."""
        return self._waiting.room

    def submit(self, group: WaitingGroup) -> None:
        if group.is_open:
            self._begin(group)
        else:
            self._waiting.submit(group)
            self._order.submit(group)

    def next(self, loads: EngineLoads) -> NextRollout | None:
        started = self._chosen(may_begin=loads.may_begin)
        if started is None:
            return None
        return NextRollout(self._started.take(started), started.choose_engine(loads, self._affinity))

    def _chosen(self, *, may_begin: bool) -> StartedGroup | None:
        oldest = self._started.oldest
        if oldest is not None and self._started.num_begun - oldest.number >= self._window:
            return oldest
        started = self._started.first()
        waiting = self._to_begin(started) if may_begin else None
        return started if waiting is None else self._begin(self._waiting.begin(waiting.group))

    def _to_begin(self, started: StartedGroup | None) -> WaitingGroup | None:
        """The group to begin now, if that comes before the ``started`` one."""
        overdue = self._waiting.overdue
        first = self._order.first()
        if overdue is not None and started is None:
            return overdue
        if first is None or (started is not None and first[1] <= self._prediction(started.group) + LEAVES_FOR):
            return None
        return overdue or first[0]

    def _begin(self, group: WaitingGroup) -> StartedGroup:
        self._order.drop(group.group)
        self._begun[group.group] = group
        return self._started.begin(group)

    def _prediction(self, group: WaitingGroup) -> float:
        known = self._predictor.of_instance(group.instance_id)
        return self._predictor.of_prompt(group.num_chars) if known is None else known

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:
        group = self._begun.get(rollout.group)
        self._started.ended(rollout)
        if group is not None:
            if end.ending == "finished":
                self._predictor.add(group.instance_id, end.tokens, group.num_chars)
                self._note_seen(group)
            else:
                self._note_longer(group, end.tokens)
            if self._started.get(rollout.group) is None:
                del self._begun[rollout.group]

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - tokens are what counts
        self._started.again(rollout)
        if (group := self._begun.get(rollout.group)) is not None:
            self._note_longer(group, tokens)

    def _note_longer(self, group: WaitingGroup, tokens: int) -> None:
        if self._predictor.add_bound(group.instance_id, tokens):
            self._note_seen(group)

    def _note_seen(self, group: WaitingGroup) -> None:
        self._order.note_seen(group.instance_id)
        started = self._started.get(group.group)
        if started is not None:
            self._started.rank_anew(started)

    def lost(self, rollout: RolloutKey) -> None:
        self._started.again(rollout)

    def closed(self, group: str) -> None:
        self._waiting.drop(group)
        self._order.drop(group)
        self._started.drop(group)
        self._begun.pop(group, None)

    def engine_lost(self, url: str) -> None:
        """Nothing is bound to an engine: each choice looks at those that answer."""

    def begin_step(self, number: int) -> None:
        """Steps make no difference."""
