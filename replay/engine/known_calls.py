"""The recorded calls of a file: which answer is whose, and what comes nearest to a request that has none."""

from collections import defaultdict
from pathlib import Path

from forebay.replay.call_request import CallRequest, Match
from forebay.replay.differences import first_difference
from forebay.replay.engine.answers import AllGiven, EqualAnswers, likeness
from forebay.replay.recorded_calls import CallReply, RecordedCall
from forebay.replay.recording import Recording

MAX_COMPARED = 64
"""Recorded requests that a miss is compared with."""


class KnownCalls:
    """The calls of the file ``path``, which is read while others are added to it.

    ``wraps``: after the last answer to a request comes its first again. Raises ``FileNotFoundError``,
    ``RecordingDamaged`` for what is no recording, or damaged anywhere, ``InvalidInput`` if ``match`` fails.
    """

    def __init__(self, path: Path, *, wraps: bool = False, match: Match | None = None) -> None:
        self._wraps, self._match = wraps, match
        self._unused: set[int] = set()
        self._answers: dict[bytes, EqualAnswers] = {}
        self._by_path: defaultdict[tuple[str, str], dict[bytes, None]] = defaultdict(dict)
        self._offsets: dict[int, int] = {}
        """The record of each call, by its number."""
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
        """Read no more."""
        self._recording.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def unused(self) -> list[CallRequest]:
        """The calls of the file that sampled, and whose answers were not given, in order. Works after ``close``."""
        with Recording.open(self._recording.path) as recording:
            return [recording.call(self._offsets[seq]).request for seq in sorted(self._unused)]

    def add_given(self, request: CallRequest, seq: int, offset: int) -> None:
        """One that has been added to the file, and given."""
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
            seq = self._once_more(request, answers)
        answers.last[lane] = seq
        self._unused.discard(seq)
        return self._read(seq).reply

    def _once_more(self, request: CallRequest, answers: EqualAnswers) -> int:
        if not request.is_drawn:
            return answers.last.get(request.lane, answers.first)
        if not self._wraps:
            raise AllGiven(sum(map(len, answers.lanes.values())))
        answers.refill(request.lane)
        seq = answers.pop(request.lane)
        assert seq is not None
        return seq

    def nearest(self, request: CallRequest) -> str:
        """In words, the recorded request that is most like this one, and in what it differs first."""
        request = request.matched(self._match)
        found = self._most_like(request)
        if found is None:
            others = ", ".join(sorted({path for method, path in self._by_path if method == request.method}))
            return f"nothing was recorded for this path{', but for ' if others else ''}{others[:1_000]}"
        seq, recorded = found
        difference = first_difference(recorded.counts, request.counts)
        words = "its body is no JSON" if difference is None else difference.in_words("recorded", "now")
        where = f" (group and slot {recorded.lane})" if recorded.lane else ""
        return f"the nearest recorded request is call {seq}{where}; {words}"

    def _most_like(self, request: CallRequest) -> tuple[int, CallRequest] | None:
        known = [self._answers[digest] for digest in self._by_path.get((request.method, request.path), ())]
        # Of its own lane first: a conversation that went another way is most often one with itself.
        known.sort(key=lambda answers: request.lane not in answers.lanes)
        text, best, best_score = request.counted_text, None, -1.0
        for answers in known[:MAX_COMPARED]:
            seq = answers.lanes[request.lane][0] if request.lane in answers.lanes else answers.first
            recorded = self._read(seq).request.matched(self._match)
            score = likeness(text, recorded.counted_text) + (recorded.is_stream == request.is_stream)
            if score > best_score:
                best, best_score = (seq, recorded), score
        return best

    def _read(self, seq: int) -> RecordedCall:
        return self._recording.call(self._offsets[seq])

    def _add(self, request: CallRequest, seq: int, offset: int) -> None:
        self._offsets[seq] = offset
        self._answers.setdefault(request.digest, EqualAnswers()).add(request.lane, seq)
        self._by_path[request.method, request.path][request.digest] = None
