"""What failed in a run: attempts and the time they took, by kind and tool, and a run that delivered nothing."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from forebay.telemetry.analysis.causes.wording import of_run
from forebay.telemetry.analysis.report import Finding, StepSummary
from forebay.telemetry.analysis.timeline import ProfileStep
from forebay.telemetry.numbers import counted, seconds_text

_MOST = 4


class Failures:
    """Counts the failures of all steps."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._num_attempts = 0
        self._num_requests = 0
        self._num_used = 0
        self._is_open = False
        self._discarded: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def add(self, step: ProfileStep) -> None:
        """Add the requests of a step."""
        for request in step.requests:
            self._num_requests += 1
            self._num_used += request.is_used
            self._num_attempts += request.num_attempts
            self._is_open |= request.ending == "open"
            if request.discarded:
                self._discarded[request.discarded] += 1
            if request.ending == "failed":
                self._failed[request.failed[-1].kind if request.failed else "failed"] += 1
            for attempt in request.failed:
                name = f"the tool {attempt.tool} raised" if attempt.tool else attempt.kind
                self._num[name] += 1
                self._seconds[name] += attempt.end_s - attempt.begin_s

    def sentences(self) -> Iterator[str]:
        """Attempts and seconds by what failed."""
        if self._num:
            most = sorted(self._seconds, key=lambda name: -self._seconds[name])[:_MOST]
            why = ", ".join(f"{name} {self._num[name]:,} ({seconds_text(self._seconds[name])})" for name in most)
            yield f"{self._num.total():,} of {counted(self._num_attempts, 'attempt')} failed: {why}."

    def findings(self, steps: Sequence[StepSummary]) -> Iterator[Finding]:
        """A finding on a run that delivered nothing, although rollouts ended: the trainer waited in vain."""
        if self._num_used or self._is_open or not self._num_requests:
            return
        reasons = [
            f"{number:,} of {self._num_requests:,} requests {what} ({why})"
            for what, counts in (("failed", self._failed), ("were in discarded groups", self._discarded))
            for why, number in counts.most_common(_MOST)
        ]
        text = f"No group was delivered: {'; '.join(reasons) or 'no request ended with a sample'}"
        (event, _), *_ = [*self._failed.most_common(1), *self._discarded.most_common(1), ("", 0)]
        seconds = sum(step.seconds if step.wait_s is None else step.wait_s for step in steps)
        yield of_run(steps, "nothing_delivered", seconds, text, event)
