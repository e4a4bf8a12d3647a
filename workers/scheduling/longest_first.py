"""Starts long answers first, so that the last ones to end are short."""

import heapq
import math

from forebay.core.ids import InstanceId
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.lengths import LengthPredictor
from forebay.workers.scheduling.started_groups import StartedGroup, StartedGroups
from forebay.workers.scheduling.waiting_groups import WaitingGroups

LEAVES_FOR = math.log(1.25)
"""Log ratio by which a waiting group must be longer than a started one to begin before the rest of that."""


class LongestFirst:
    """Starts the rollout of the group with the longest predicted answers.

    A started group comes before a waiting one, unless the latter is predicted to be a quarter longer: trainers need
    whole groups, and predictions are inexact. No waiting or started group is overtaken by more than ``window`` later
    ones. Engines are chosen as by ``pull``.
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
        """Started groups with rollouts that may still end, even if none is left to start."""

    def room(self) -> int:
        """Number of further groups it accepts. Implements ``Policy``, like all methods below."""
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
        """The waiting group to begin before the ``started`` one, or None."""
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

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - only tokens count
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
            self._started.update_rank(started)

    def lost(self, rollout: RolloutKey) -> None:
        self._started.again(rollout)

    def closed(self, group: str) -> None:
        self._waiting.drop(group)
        self._order.drop(group)
        self._started.drop(group)
        self._begun.pop(group, None)

    def engine_lost(self, url: str) -> None:
        """Do nothing: rollouts are not bound to engines, and each choice considers those that answer."""

    def begin_step(self, number: int) -> None:
        """Do nothing: steps do not affect the policy."""


_Entry = tuple[float, int, str]
"""Sort key, number of the submission, and the group's id."""


class PredictedOrder:
    """Orders waiting groups: longest first, and groups with equal predictions in order of submission.

    Each known instance has its own prediction. The line that predicts all others changes with every answer, but its
    order is always that of their prompts: ascending, descending or by submission.
    """

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor
        self._num_submitted = 0
        self._numbers: dict[str, tuple[int, WaitingGroup]] = {}
        self._of_instance: dict[InstanceId, set[str]] = {}
        self._known: dict[str, float] = {}
        """Predictions of groups whose instance is known."""
        # Heaps. Outdated entries are discarded when they reach the top.
        self._by_prediction: list[_Entry] = []
        self._by_prompt: dict[int, list[_Entry]] = {-1: [], 0: [], 1: []}

    def submit(self, group: WaitingGroup) -> None:
        """Add a group."""
        self._num_submitted += 1
        self._numbers[group.group] = self._num_submitted, group
        self._of_instance.setdefault(group.instance_id, set()).add(group.group)
        if self._predictor.of_instance(group.instance_id) is not None:
            self._note(group.group)
            return
        for sign, heap in self._by_prompt.items():
            heapq.heappush(heap, (-float(sign * group.num_chars), self._num_submitted, group.group))

    def note_seen(self, instance_id: InstanceId) -> None:
        """Update the predictions of an instance's groups."""
        for group in self._of_instance.get(instance_id, ()):
            self._note(group)

    def drop(self, group: str) -> None:
        """Remove a group, if present."""
        _, found = self._numbers.pop(group, (0, None))
        if found is not None:
            self._known.pop(group, None)
            groups = self._of_instance[found.instance_id]
            groups.discard(group)
            if not groups:
                del self._of_instance[found.instance_id]

    def first(self) -> tuple[WaitingGroup, float] | None:
        """The group with the longest prediction, and the prediction; None without groups."""
        known, unknown = self._first_known(), self._first_unknown()
        if known is None or (unknown is not None and unknown[1] > known[1]):
            return unknown
        return known

    def _first_known(self) -> tuple[WaitingGroup, float] | None:
        while heap := self._by_prediction:
            negated, number, key = heap[0]
            if self._known.get(key) == -negated and self._numbers[key][0] == number:
                return self._numbers[key][1], -negated
            heapq.heappop(heap)
        return None

    def _first_unknown(self) -> tuple[WaitingGroup, float] | None:
        slope = self._predictor.slope
        heap = self._by_prompt[(slope > 0) - (slope < 0)]
        while heap:
            _, number, key = heap[0]
            if key not in self._known and self._numbers.get(key, (0, None))[0] == number:
                group = self._numbers[key][1]
                return group, self._predictor.of_prompt(group.num_chars)
            heapq.heappop(heap)
        return None

    def _note(self, key: str) -> None:
        number, group = self._numbers[key]
        prediction = self._predictor.of_instance(group.instance_id)
        if prediction is not None and prediction != self._known.get(key):
            self._known[key] = prediction
            heapq.heappush(self._by_prediction, (-prediction, number, key))
            self._compact()

    def _compact(self) -> None:
        """Rebuild heaps that are mostly outdated entries, which are only discarded at the top."""
        most = 4 * len(self._numbers) + 64
        if len(self._by_prediction) > most:
            self._by_prediction = [(-each, self._numbers[key][0], key) for key, each in self._known.items()]
            heapq.heapify(self._by_prediction)
        for sign, heap in self._by_prompt.items():
            if len(heap) > most:
                live = [each for each in heap if each[2] not in self._known and each[2] in self._numbers]
                heapq.heapify(live)
                self._by_prompt[sign] = live
