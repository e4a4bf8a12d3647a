"""Whether the data of a log can be true. Findings that would rest on data that cannot be are not reported."""

from collections.abc import Container
from itertools import pairwise
from statistics import median

from forebay.telemetry.analysis.report import Finding
from forebay.telemetry.analysis.timeline import ProfileStep, Request

NEED_TOKENS = ("long_answer", "slow_rate", "slow_engine")
"""Causes that are known only from the tokens of calls."""
CLEARLY = 1.1
"""Times are doubted if they are this many times as long as possible."""
MILLISECONDS = 100
"""If they are this many times as long, their unit must be wrong."""
_SEVERAL = 0.1
"""A step is doubted if this share of its requests is; below, only these requests are."""
_NAMED = 5


class Distrust:
    """Looks at each step once, in any order."""

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float, str]] = []
        """End, begin and name of each step."""
        self._overlong: dict[str, float] = {}
        self._requests: set[tuple[str, str]] = set()
        """Step and id of single requests that are doubted."""
        self._repeated: list[str] = []
        self._num_calls = self._num_uncounted = 0

    def look(self, step: ProfileStep) -> None:
        """Note what cannot be true in ``step``."""
        self._bounds.append((step.end_s, step.begin_s, step.name))
        for request in step.requests:
            calls = _calls(request)
            self._num_calls += len(calls)
            self._num_uncounted += sum(not tokens for tokens in calls)
        if 2 * step.num_repeated > len(step.requests):
            self._repeated.append(step.name)
            return
        sums = {each.request_id: _sum_of_parts(each) for each in step.requests}
        overlong = {name: times for name, times in sums.items() if times > CLEARLY} | step.overlong
        if "" in overlong or len(overlong) > _SEVERAL * len(step.requests):
            self._overlong[step.name] = median(overlong.values())
        else:
            self._requests |= {(step.name, name) for name in overlong}

    def notes(self) -> list[str]:
        """One note for each doubt: what is wrong, in how many steps, and what follows."""
        found = []
        overlapping = self._overlapping()
        for steps, what in (
            (self._overlong, "the parts of requests or workers add up to more than the whole"),
            (overlapping, "the duration is longer than the time since the step before"),
        ):
            if steps:
                unit = "; they seem to be milliseconds where seconds are expected" if _is_of_unit(steps) else ""
                found.append(f"{self._share(steps)}, {what}: durations are wrong{unit}. {_NO_FINDINGS}")
        if self._repeated:
            found.append(
                f"{self._share(self._repeated)}, most requests end more than once at the same worker: "
                f"the log was written twice, or by two runs. {_NO_FINDINGS}"
            )
        if self._lacks_tokens():
            found.append(
                f"{self._num_uncounted:,} of {self._num_calls:,} calls have no number of sampled tokens: "
                "the report cannot tell long answers from slow engines."
            )
        return found

    def hides(self, finding: Finding) -> bool:
        """Whether ``finding`` is based on data that cannot be true."""
        if finding.cause in NEED_TOKENS and self._lacks_tokens():
            return True
        steps = {*self._overlong, *self._overlapping(), *self._repeated}
        path = finding.path
        if not path.step or finding.share_of == "run":
            return 2 * len(steps) > len(self._bounds)
        return path.step in steps or (path.step, path.request) in self._requests

    def _lacks_tokens(self) -> bool:
        return 2 * self._num_uncounted > self._num_calls

    def _overlapping(self) -> dict[str, float]:
        """The steps that began clearly before the one before them ended, and how many times too long they are."""
        ordered = sorted(self._bounds)
        found = {}
        for (before_s, _, _), (end_s, begin_s, name) in pairwise(ordered):
            possible_s = max(end_s - before_s, 1e-9)
            if end_s - begin_s > CLEARLY * possible_s:
                found[name] = (end_s - begin_s) / possible_s
        if 2 * len(found) > len(ordered) - 1 > 0:  # the first one cannot be checked
            found.setdefault(ordered[0][2], median(found.values()))
        return found

    def _share(self, steps: Container[str]) -> str:
        names = [name for _, _, name in self._bounds if name in steps]
        named = f" ({', '.join(names)})" if len(names) <= _NAMED else ""
        return f"In {len(names)} of {len(self._bounds)} steps{named}"


_NO_FINDINGS = "There are no findings about these steps."


def _calls(request: Request) -> list[int]:
    """The sampled tokens of each call that ended. A request without turns counts as one call."""
    if request.ending != "finished":
        return []
    return [turn.sampled_tokens for turn in request.turns] or [request.sampled_tokens]


def _sum_of_parts(request: Request) -> float:
    """The sum of its phases, divided by its duration."""
    return sum(request.phases.values()) / max(request.duration_s, 1e-9)


def _is_of_unit(times: dict[str, float]) -> bool:
    return median(times.values()) > MILLISECONDS
