"""Whether the data of a log can be true. Findings that would rest on data that cannot be are not reported."""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise
from statistics import median

from forebay.telemetry.analysis.report import Finding
from forebay.telemetry.analysis.timeline import ProfileStep
from forebay.telemetry.analysis.verl_lines import COMPLETE, MONITORING, RESOLUTION_NS, STATES, STEP_TOTAL, VerlLine

NEED_TOKENS = ("long_answer", "slow_rate", "slow_engine", "network")
"""Causes that are known only from the tokens of calls."""
CLEARLY = 1.1
"""Times are doubted if they are this many times as long as possible."""
_MILLISECONDS = 100
"""If they are this many times as long, their unit must be wrong."""
_SEVERAL = 0.1
"""A step is doubted if this share of its requests is; below, only these requests are."""
_NAMED = 5
_NOT_ALONE = {"reward_duration", MONITORING, STEP_TOTAL}


class Distrust:
    """Looks at each step once, in any order."""

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float, str]] = []
        """End, begin and name of each step."""
        self._overlong: dict[str, float] = {}
        """By step: how many times as long as possible its times are, as also in the next."""
        self._repeated: dict[str, float] = {}
        self._requests: set[tuple[str, str]] = set()
        """Step and id of single requests that are doubted."""
        self._num_calls = self._num_uncounted = 0

    def look(self, step: ProfileStep) -> None:
        """Note what cannot be true in ``step``."""
        self._bounds.append((step.end_s, step.begin_s, step.name))
        overlong = dict(step.overlong)
        for request in step.requests:
            if request.ending == "finished":
                counts = [turn.sampled_tokens for turn in request.turns] or [request.sampled_tokens]
                self._num_calls += len(counts)
                self._num_uncounted += counts.count(0)
            parts_s = sum(request.phases.values())
            if parts_s > CLEARLY * request.duration_s > 0:
                overlong[request.request_id] = parts_s / request.duration_s
        if 2 * step.num_repeated > len(step.requests):
            self._repeated[step.name] = 1.0
        elif "" in overlong or len(overlong) > _SEVERAL * len(step.requests):
            self._overlong[step.name] = median(overlong.values())
        else:
            self._requests |= {(step.name, name) for name in overlong}

    def notes(self) -> list[str]:
        """One note for each doubt: what is wrong, in how many steps, and what follows."""
        doubts = (
            (self._overlong, "the parts of requests or workers add up to more than the whole"),
            (self._overlapping(), "the duration is longer than the time since the step before"),
            (self._repeated, "most requests end twice at the same worker, as if the log had been written twice"),
        )
        found = [self._note(steps, what) for steps, what in doubts if steps]
        if self._lacks_tokens():
            found.append(
                f"{self._num_uncounted:,} of {self._num_calls:,} calls have no number of sampled tokens: "
                "the report cannot tell long answers from slow engines."
            )
        return found

    def believed(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those of ``findings`` that are not based on data that cannot be true."""
        steps = self._overlong.keys() | self._overlapping().keys() | self._repeated.keys()
        return [finding for finding in findings if not self._hides(finding, steps)]

    def _hides(self, finding: Finding, steps: Collection[str]) -> bool:
        if finding.cause in NEED_TOKENS and self._lacks_tokens():
            return True
        path = finding.path
        if not path.step or finding.share_of == "run":
            return 2 * len(steps) > len(self._bounds)
        return path.step in steps or (path.step, path.request) in self._requests

    def _note(self, steps: dict[str, float], what: str) -> str:
        names = [name for _, _, name in self._bounds if name in steps]
        named = f" ({', '.join(names)})" if len(names) <= _NAMED else ""
        unit = "; durations seem to be milliseconds, not seconds" if median(steps.values()) > _MILLISECONDS else ""
        where = f"{len(names)} of {len(self._bounds)} steps{named}"
        return f"In {where}, {what}{unit}. There are no findings about these steps."

    def _lacks_tokens(self) -> bool:
        return 2 * self._num_uncounted > self._num_calls

    def _overlapping(self) -> dict[str, float]:
        """The steps that began clearly before the one before them ended."""
        ordered = sorted(self._bounds)
        found = {
            name: (end_s - begin_s) / max(end_s - before_s, 1e-9)
            for (before_s, _, _), (end_s, begin_s, name) in pairwise(ordered)
            if end_s - begin_s > CLEARLY * (end_s - before_s)
        }
        if 2 * len(found) > len(ordered) - 1 > 0:  # then the first one, which cannot be checked, is doubted too
            found.setdefault(ordered[0][2], median(found.values()))
        return found


def times_too_long(lines: list[VerlLine], event: str = COMPLETE) -> float:
    """How many times as long as the whole (``event``) its parts are, or it is itself by the time stamps of starts."""
    whole = max((line for line in lines if line.event == event), key=lambda line: line.d or 0, default=None)
    if whole is None or not whole.d:
        return 0.0
    starts = [line.end for line in lines if line.d is None and line.event.endswith("_start")]
    claimed = whole.d / max(whole.end - min(starts), 1) if starts else 0.0
    if claimed > _MILLISECONDS:  # a start may be logged late, so only a wrong unit is certain
        return claimed
    # verl runs these alone: a state of a request, or a phase that a worker has once.
    once = {event for event, number in Counter(line.event for line in lines).items() if number == 1}
    alone = STATES | {event for event in once - _NOT_ALONE if event.endswith("_duration")}
    least, most = whole.begin + RESOLUTION_NS, whole.end + RESOLUTION_NS
    parts = [
        (line.end - line.d, line.end)
        for line in lines
        if line.d and least < line.end <= most and (line.d > whole.d or line.event in alone)
    ]
    total, first, last = 0, 0, 0
    for begin, end in sorted(parts):
        if end > last + RESOLUTION_NS:  # otherwise it is inside another part
            total += end - (begin if begin > first + RESOLUTION_NS else last)
            first, last = begin, end
    return total / whole.d
