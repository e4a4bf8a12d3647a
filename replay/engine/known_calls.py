"""The recorded calls of a file: which answer is whose, and what comes nearest to a request that has none."""

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from forebay.replay.differences import first_difference
from forebay.replay.engine.answers import AllGiven, EqualAnswers, likeness
from forebay.replay.engine.call_frames import (
    COLUMNS,
    MAX_REQUEST_BYTES,
    CallReply,
    DamagedRow,
    Row,
    decode_call,
    typed_row,
)
from forebay.replay.engine.call_request import CallRequest, Match
from forebay.replay.recording_reader import Frames
from forebay.replay.recording_schema import open_recording

logger = logging.getLogger(__name__)

Unwritten = Callable[[int], tuple[CallRequest, CallReply] | None]

MAX_COMPARED = 64
"""Recorded requests that a miss is compared with."""
OF_A_CALL = f"SELECT {COLUMNS} FROM calls WHERE seq = ?"  # noqa: S608 - our own text
OF_THE_TABLE = "SELECT seq FROM calls NOT INDEXED"
OF_ITS_INDEX = "SELECT seq FROM calls INDEXED BY sqlite_autoindex_calls_1"
NOT_THERE = "one of its pages is damaged, or the index of the table is"


class KnownCalls:
    """The calls of the file ``path``, which is read while others are added to it.

    ``unwritten`` tells those, by their numbers, that are not in it yet.

    ``wraps``: after the last answer to a request comes its first again. Raises ``FileNotFoundError``,
    ``RecordingDamaged`` for what is no recording, ``InvalidInput`` if ``match`` fails. Damaged calls are in
    ``damaged``, and told in the log.
    """

    def __init__(
        self, path: Path, *, wraps: bool = False, match: Match | None = None, unwritten: Unwritten = lambda _: None
    ) -> None:
        self.path = path
        self.damaged: dict[int, str] = {}
        """By number, what is wrong with it."""
        self._wraps, self._match, self._unwritten = wraps, match, unwritten
        self._unused: set[int] = set()
        self._answers: dict[bytes, EqualAnswers] = {}
        self._by_path: defaultdict[tuple[str, str], dict[bytes, None]] = defaultdict(dict)
        self._frames = Frames()
        self._connection = open_recording(path)
        # What is damaged may be no text any more; it is told in messages, which have to be.
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            self._load()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Read no more."""
        self._connection.close()

    def __len__(self) -> int:
        return sum(len(lane) for answers in self._answers.values() for lane in answers.lanes.values())

    def unused(self) -> list[CallRequest]:
        """The calls of the file that sampled, and whose answers were not given, in order. Works after ``close``."""
        with closing(open_recording(self.path)) as connection:
            rows = [connection.execute(OF_A_CALL, (seq,)).fetchone() for seq in sorted(self._unused)]
        return [decode_call(row, self._frames)[0] for row in rows]

    def add_given(self, request: CallRequest, seq: int) -> None:
        """One that has been added to the file, and given."""
        request = request.matched(self._match)
        self._add(request.digest, request.lane, request.method, request.path, seq)
        self._answers[request.digest].left[request.lane].remove(seq)

    def take(self, request: CallRequest) -> CallReply | None:
        """The next recorded answer, None without one. Raises ``AllGiven``, ``DamagedRow``, ``InvalidInput``."""
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
        return self._read(seq)[1]

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
            try:
                recorded = self._read(seq)[0].matched(self._match)
            except DamagedRow:
                continue
            score = likeness(text, recorded.counted_text) + (recorded.is_stream == request.is_stream)
            if score > best_score:
                best, best_score = (seq, recorded), score
        return best

    # --- reading the file

    def _load(self) -> None:
        self._check_format()
        numbers = [set(self._numbers(query)) for query in (OF_THE_TABLE, OF_ITS_INDEX)]
        in_both = numbers[0] & numbers[1]
        for seq in sorted(numbers[0] | numbers[1]):
            try:
                self._place(seq, self._row(seq))
                if seq not in in_both:
                    raise DamagedRow(NOT_THERE)
            except DamagedRow as error:
                self._note(seq, str(error))

    def _place(self, seq: int, row: Row) -> None:
        """Put a call where its request is looked for. Raises ``DamagedRow``.

        A damaged one keeps its place: the next answer is not its request's.
        """
        _, lane, digest, _, method, path, frame, *_ = row
        digests = {digest}
        try:
            request = decode_call(row, self._frames)[0].matched(self._match)
            lane, digests = request.lane, {request.digest}
            if request.is_drawn:
                self._unused.add(seq)
        except DamagedRow:
            with suppress(ValueError):
                # What has a checksum of its own is right where a column says something else.
                request = CallRequest.read(method, path, self._frames.content(frame, most=MAX_REQUEST_BYTES))
                lane, digests = request.lane, {digest, request.matched(self._match).digest}
            raise
        finally:
            for each in digests:
                self._add(each, lane, method, path, seq)

    def _check_format(self) -> None:
        try:
            problems = [text for (text,) in self._connection.execute("PRAGMA integrity_check")]
        except sqlite3.DatabaseError as error:
            problems = [str(error)]
        if problems != ["ok"]:
            for problem in problems:
                self._note(0, problem)

    def _numbers(self, query: str) -> Iterator[int]:
        try:
            for (seq,) in self._connection.execute(query):
                yield seq
        except sqlite3.DatabaseError as error:
            self._note(0, str(error))

    def _row(self, seq: int) -> Row:
        try:
            row = self._connection.execute(OF_A_CALL, (seq,)).fetchone()
        except sqlite3.DatabaseError as error:
            raise DamagedRow(str(error)) from None
        if row is None:
            raise DamagedRow(NOT_THERE)
        return typed_row(row)

    def _read(self, seq: int) -> tuple[CallRequest, CallReply]:
        if seq in self.damaged:
            raise DamagedRow(f"call {seq} of {self.path.name} is damaged: {self.damaged[seq]}")
        return self._unwritten(seq) or decode_call(self._row(seq), self._frames)

    def _add(self, digest: bytes, lane: str, method: str, path: str, seq: int) -> None:
        self._answers.setdefault(digest, EqualAnswers()).add(lane, seq)
        self._by_path[method, path][digest] = None

    def _note(self, seq: int, problem: str) -> None:
        self.damaged[seq] = f"{self.damaged[seq]}; {problem}" if seq in self.damaged else problem
        logger.error("%s is damaged: %s%s", self.path, f"call {seq}: " if seq else "", problem)
