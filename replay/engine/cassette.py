"""The recorded calls of a file: finds the answer to a request, or the nearest request if there is none.

The k-th of equal requests gets the k-th answer, from its own lane first. No answer is given twice.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forebay.replay.call_request import CallRequest, Match
from forebay.replay.differences import first_difference
from forebay.replay.recorded_calls import CallReply, RecordedCall
from forebay.replay.recording import Recording

MAX_COMPARED = 64
"""How many recorded requests a miss is compared with."""


class AllGiven(Exception):
    """The request was recorded, but every answer has been given."""

    def __init__(self, num_answers: int) -> None:
        super().__init__(num_answers)
        self.num_answers = num_answers


@dataclass(slots=True)
class EqualAnswers:
    """The answers to equal requests, by number. ``lanes`` has all numbers, ``left`` those not given yet."""

    lanes: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    left: dict[str, deque[int]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    """The answer given last in each lane."""

    @property
    def first(self) -> int:
        return min(min(lane) for lane in self.lanes.values())

    def add(self, lane: str, seq: int) -> None:
        """Add an answer that may be given."""
        self.lanes[lane].append(seq)
        self.left.setdefault(lane, deque()).append(seq)

    def pop(self, lane: str) -> int | None:
        """The next answer: from this lane, from none, or from any; None if all have been given."""
        own = self.left.get(lane) or self.left.get("") or self._of_another()
        return own.popleft() if own else None

    def refill(self, lane: str) -> None:
        """Make the answers of this lane available again, or those of all lanes if it has none."""
        for each in [lane] if lane in self.lanes else list(self.lanes):
            self.left[each] = deque(self.lanes[each])

    def _of_another(self) -> deque[int] | None:
        begun = [lane for lane in self.left.values() if lane]
        return min(begun, key=lambda lane: lane[0], default=None)


class Cassette:
    """The calls in the file ``path``, to which others may be appended meanwhile.

    ``wraps``: after the last answer to a request, start over with the first. Raises ``FileNotFoundError``,
    ``RecordingDamaged`` if the file is not a recording or is damaged anywhere, ``InvalidInput`` if ``match`` fails.
    """

    def __init__(self, path: Path, *, wraps: bool = False, match: Match | None = None) -> None:
        self._wraps, self._match = wraps, match
        self._unused: set[int] = set()
        self._answers: dict[bytes, EqualAnswers] = {}
        self._by_path: defaultdict[tuple[str, str], dict[bytes, None]] = defaultdict(dict)
        self._offsets: dict[int, int] = {}
        """The offset of each call's record, by number."""
        self._recording = Recording.open(path)
        try:
            for offset, call in self._recording.placed_calls():
                request = call.request.matched(match)
                self._add(request, call.seq, offset)
                if request.is_drawn:
                    self._unused.add(call.seq)
        except BaseException:
            self._recording.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._recording.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def unused(self) -> list[CallRequest]:
        """The recorded calls that sampled and whose answers were not given, in order. Works after ``close``."""
        with Recording.open(self._recording.path) as recording:
            return [recording.call(self._offsets[seq]).request for seq in sorted(self._unused)]

    def add_given(self, request: CallRequest, seq: int, offset: int) -> None:
        """Register a call that has been appended to the file, and whose answer has been given."""
        request = request.matched(self._match)
        self._add(request, seq, offset)
        self._answers[request.digest].left[request.lane].remove(seq)

    def take(self, request: CallRequest) -> CallReply | None:
        """The next recorded answer, None without one. Raises ``AllGiven``, ``RecordingDamaged``, ``InvalidInput``."""
        request = request.matched(self._match)
        answers = self._answers.get(request.digest)
        if answers is None:
            return None
        lane = request.lane
        if self._wraps and request.is_drawn and not answers.left.get(lane) and lane in answers.lanes:
            answers.refill(lane)
        seq = answers.pop(lane)
        if seq is None:
            seq = self._start_over(request, answers)
        answers.last[lane] = seq
        self._unused.discard(seq)
        return self._read(seq).reply

    def _start_over(self, request: CallRequest, answers: EqualAnswers) -> int:
        if not request.is_drawn:
            return answers.last.get(request.lane, answers.first)
        if not self._wraps:
            raise AllGiven(sum(map(len, answers.lanes.values())))
        answers.refill(request.lane)
        seq = answers.pop(request.lane)
        assert seq is not None
        return seq

    def nearest(self, request: CallRequest) -> str:
        """Describe the recorded request most similar to this one, and the first difference."""
        request = request.matched(self._match)
        found = self._most_like(request)
        if found is None:
            others = ", ".join(sorted({path for method, path in self._by_path if method == request.method}))
            return f"nothing was recorded for this path{', only for ' if others else ''}{others[:1_000]}"
        seq, recorded = found
        difference = first_difference(recorded.counts, request.counts)
        words = "its body is not JSON" if difference is None else difference.in_words("recorded", "now")
        where = f" (group and slot {recorded.lane})" if recorded.lane else ""
        return f"the nearest recorded request is call {seq}{where}; {words}"

    def _most_like(self, request: CallRequest) -> tuple[int, CallRequest] | None:
        known = [self._answers[digest] for digest in self._by_path.get((request.method, request.path), ())]
        # Its own lane first: a diverging conversation is most similar to its own recording.
        known.sort(key=lambda answers: request.lane not in answers.lanes)
        text, best, best_score = request.counted_text, None, -1.0
        for answers in known[:MAX_COMPARED]:
            seq = answers.lanes[request.lane][0] if request.lane in answers.lanes else answers.first
            recorded = self._read(seq).request.matched(self._match)
            score = _likeness(text, recorded.counted_text) + (recorded.is_stream == request.is_stream)
            if score > best_score:
                best, best_score = (seq, recorded), score
        return best

    def _read(self, seq: int) -> RecordedCall:
        return self._recording.call(self._offsets[seq])

    def _add(self, request: CallRequest, seq: int, offset: int) -> None:
        self._offsets[seq] = offset
        self._answers.setdefault(request.digest, EqualAnswers()).add(request.lane, seq)
        self._by_path[request.method, request.path][request.digest] = None


def _likeness(one: bytes, other: bytes) -> float:
    """The share of both texts covered by their common prefix and suffix."""
    size = min(len(one), len(other))
    begin = _num_equal(size, lambda count: one[:count] == other[:count])
    end = _num_equal(size - begin, lambda count: one[len(one) - count :] == other[len(other) - count :])
    return (begin + end) / max(len(one), len(other), 1)


def _num_equal(size: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to ``size`` for which ``holds`` is true; it is true for all smaller counts, too."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
