"""Groups that wait, in the order of how long their answers will be, while what is known of that changes."""

import heapq

from forebay.core.ids import InstanceId
from forebay.core.scheduling.policy import WaitingGroup
from forebay.workers.scheduling.lengths import LengthPredictor

_Entry = tuple[float, int, str]
"""What it is ordered by, the number of its submission, and the group's id."""


class PredictedOrder:
    """The longest first. Of those with the same prediction the one that came first.

    Of instances that were seen each has a prediction of its own. The line that predicts all others moves with every
    answer, but their order by it is that of their prompts: up, down, or as they came.
    """

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor
        self._num_submitted = 0
        self._numbers: dict[str, tuple[int, WaitingGroup]] = {}
        self._of_instance: dict[InstanceId, set[str]] = {}
        self._known: dict[str, float] = {}
        """The predictions of groups whose instance was seen."""
        # Heaps; entries that are out of date are found when they come up.
        self._by_prediction: list[_Entry] = []
        self._by_prompt: dict[int, list[_Entry]] = {-1: [], 0: [], 1: []}

    def submit(self, group: WaitingGroup) -> None:
        """Add one."""
        self._num_submitted += 1
        self._numbers[group.group] = self._num_submitted, group
        self._of_instance.setdefault(group.instance_id, set()).add(group.group)
        if self._predictor.of_instance(group.instance_id) is not None:
            self._note(group.group)
            return
        for sign, heap in self._by_prompt.items():
            _push(heap, (-float(sign * group.num_chars), self._num_submitted, group.group))

    def note_seen(self, instance_id: InstanceId) -> None:
        """The prediction for an instance has changed."""
        for group in self._of_instance.get(instance_id, ()):
            self._note(group)

    def drop(self, group: str) -> None:
        """Take one out, if it is there."""
        _, found = self._numbers.pop(group, (0, None))
        if found is not None:
            self._known.pop(group, None)
            groups = self._of_instance[found.instance_id]
            groups.discard(group)
            if not groups:
                del self._of_instance[found.instance_id]

    def first(self) -> tuple[WaitingGroup, float] | None:
        """The longest one, with its prediction; None if there is none."""
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
            _push(self._by_prediction, (-prediction, number, key))
            self._compact()

    def _compact(self) -> None:
        """What is out of date below the top of a heap is never found there."""
        most = 4 * len(self._numbers) + 64
        if len(self._by_prediction) > most:
            self._by_prediction = [(-each, self._numbers[key][0], key) for key, each in self._known.items()]
            heapq.heapify(self._by_prediction)
        for sign, heap in self._by_prompt.items():
            if len(heap) > most:
                live = [each for each in heap if each[2] not in self._known and each[2] in self._numbers]
                heapq.heapify(live)
                self._by_prompt[sign] = live


_push = heapq.heappush
