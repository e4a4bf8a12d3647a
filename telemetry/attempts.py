"""Builds the attempts of a rollout from its records, with the process and file of each record.

Spans from the gateway are assigned to the run's attempt by their parent ids if possible, else by the attempt's number,
else by time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from forebay.telemetry.tracing.records import Head, Open, Record, RolloutSummary, Span

_CLOCKS_APART_NS = 10_000_000
"""How much earlier than its attempt a call may seem to begin, if another process recorded it."""


@dataclass(slots=True)
class Writer:
    """A process as the writer of one of its files."""

    file: str
    head: Head | None = None
    """None for lines before any head."""
    shift_ns: int = 0
    """Added to its times to convert them to the clock of the first process."""
    last_ns: int = 0
    """The latest time it recorded."""
    ended_ns: int = 0
    """When its process ended, as seen by the server; 0 if unknown."""

    @property
    def name(self) -> str:
        """The original name of its file."""
        head = self.head
        return f"{head.process}-{head.start}-{head.pid}.{head.number}.jsonl" if head else Path(self.file).name

    @property
    def process(self) -> str:
        """``run``, ``gateway`` or ``server``."""
        return self.head.process if self.head else ""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.head.pid if self.head else 0


class TraceLine(NamedTuple):
    """A record and its position."""

    writer: Writer
    number: int
    """Line number, starting at 1."""
    record: Record
    """Its times are on the shared clock of all writers."""


@dataclass(slots=True)
class Attempt:
    """One attempt of a rollout. Times in ns, on the shared clock of all processes."""

    uid: str
    group: str
    id: str
    writer: Writer
    summary: RolloutSummary | None
    """None if it never ended, or its summary is lost."""
    begin: int
    end: int
    number: int = 0
    is_open: bool = False
    spans: list[tuple[Writer, Span | Open]] = field(default_factory=list)
    """All its spans, without the attempt itself."""

    @classmethod
    def ended(cls, writer: Writer, summary: RolloutSummary, group: str) -> "Attempt":
        """An attempt with a summary."""
        begin, end = summary.t, summary.t + summary.d
        return cls(summary.uid, group, summary.id, writer, summary, begin, end, number=summary.attempt)


def attempts_of(uid: str, lines: Iterable[TraceLine], last_ns: int) -> list[Attempt]:
    """The attempts of the rollout ``uid`` in order, from all ``lines`` about it.

    ``last_ns`` is the end of the log: attempts without an end last until then, or until their process died.
    """
    rollout = _Rollout(uid, lines)
    if not rollout.is_one_attempt():
        rollout.sort_spans(last_ns)
    return sorted(rollout.attempts.values(), key=lambda each: each.begin)


class _Rollout:
    """The attempts of one rollout, and its spans, each once."""

    def __init__(self, uid: str, lines: Iterable[TraceLine]) -> None:
        self._uid = uid
        self._group = ""
        self._spans: dict[str, tuple[Writer, Span | Open]] = {}
        summaries: dict[str, tuple[Writer, RolloutSummary]] = {}
        for writer, _, record in lines:
            if isinstance(record, RolloutSummary):
                summaries[record.id] = writer, record
            elif isinstance(record, Span) or (isinstance(record, Open) and record.id not in self._spans):
                self._spans[record.id] = writer, record
            self._group = self._group or getattr(record, "group", "")
        self.attempts = {name: Attempt.ended(*summary, self._group) for name, summary in summaries.items()}

    def is_one_attempt(self) -> bool:
        """Assign all spans to the only attempt with a summary. Returns False if there may be another attempt."""
        if len(self.attempts) != 1:
            return False
        (only,) = self.attempts.values()
        for name, (writer, span) in self._spans.items():
            if name == only.id:
                continue
            if span.t < only.begin - _CLOCKS_APART_NS or span.name == "attempt":
                only.spans.clear()
                return False
            only.spans.append((writer, span))
        return True

    def sort_spans(self, last_ns: int) -> None:
        """Assign spans to attempts if there are several, or one without a summary."""
        self._add_unsummarised()
        for name, (writer, span) in self._spans.items():
            if name not in self.attempts:
                self._attempt_of(span).spans.append((writer, span))
        for attempt in self.attempts.values():
            self._close(attempt, last_ns)

    def _add_unsummarised(self) -> None:
        """Add attempts that are running or were killed. In their first ten seconds, only ended spans are recorded."""
        for name, (writer, span) in self._spans.items():
            if span.name == "attempt" and name not in self.attempts:
                self.attempts[name] = self._open_attempt(name, writer, span)
        for name, (writer, span) in self._spans.items():
            root = self._root(span)
            if name not in self.attempts and root not in self.attempts and (root or not self.attempts):
                ended = (each for each in self.attempts.values() if not each.is_open)
                if any(each.begin - _CLOCKS_APART_NS <= span.t <= each.end for each in ended):
                    continue  # its parent is an agent's span, which is not recorded here, or was lost
                self.attempts[root] = self._open_attempt(root, writer, span)

    def _open_attempt(self, name: str, writer: Writer, span: Span | Open) -> Attempt:
        attempt = Attempt(self._uid, self._group, name, writer, None, span.t, span.t, span.attempt, is_open=True)
        if span.name == "attempt" and isinstance(span, Span):
            attempt.end, attempt.is_open = span.t + span.d, False
        return attempt

    def _root(self, span: Span | Open) -> str:
        up = span.up
        for _ in range(64):
            above = self._spans.get(up)
            if up in self.attempts or above is None:
                break
            up = above[1].up or up
        return up

    def _attempt_of(self, span: Span | Open) -> Attempt:
        known = self.attempts.get(self._root(span))
        if known is not None:
            return known
        every = list(self.attempts.values())
        same = [each for each in every if each.number == span.attempt] or every
        return max((each for each in same if each.begin <= span.t), key=lambda each: each.begin, default=same[0])

    def _close(self, attempt: Attempt, last_ns: int) -> None:
        """Close an attempt without an end: it lasted until its process's last record, or until the next one began.

        Without a next attempt, it lasted until its process ended, or the log did.
        """
        if attempt.summary is not None:
            return
        begins = [span.t for _, span in attempt.spans]
        attempt.begin = min([attempt.begin, *begins])
        if not attempt.is_open:
            return
        ends = [span.t + span.d for _, span in attempt.spans if isinstance(span, Span)]
        later = [each.begin for each in self.attempts.values() if each.begin > attempt.begin]
        died = attempt.writer.ended_ns or last_ns
        attempt.end = max([attempt.writer.last_ns if later else died, *ends, *begins])
        attempt.end = max(min([attempt.end, *later]), attempt.begin)
