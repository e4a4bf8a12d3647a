"""Checks of verl's log: whether its durations can be true, and whether it is complete."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from forebay.telemetry.analysis.timeline import ProfileStep, Request
from forebay.telemetry.analysis.trust import MILLISECONDS
from forebay.telemetry.analysis.verl_lines import COMPLETE, MONITORING, STATE, STEP_TOTAL, VerlLine, depth_of, number_of

_RESOLUTION_NS = 2_000
_NAMED = 5


def times_too_long(lines: list[VerlLine]) -> float:
    """How many times as long a request's parts are as the request itself, or as its time stamps allow."""
    whole = next((line for line in lines if line.event == COMPLETE and line.d), None)
    if whole is None or not whole.d:
        return 0.0
    longest = whole.d
    times = _parts_of(whole, (line for line in lines if depth_of(line.event) == STATE or (line.d or 0) > longest))
    starts = [line.end for line in lines if line.d is None and line.event.endswith("_start")]
    claimed = whole.d / max(whole.end - min(starts), 1) if starts else 0.0
    # A start may be logged late, so only a wrong unit is certain.
    return max(times, claimed) if claimed > MILLISECONDS else times


def worker_too_long(lines: list[VerlLine]) -> float:
    """How many times as long the phases of a worker are as its total."""
    whole = max((line for line in lines if line.event == STEP_TOTAL), key=lambda line: line.d or 0, default=None)
    return _parts_of(whole, lines) if whole is not None else 0.0


def _parts_of(whole: VerlLine, lines: Iterable[VerlLine]) -> float:
    """The sum of the lines that end in ``whole``, without those inside others, divided by its duration."""
    last = whole.end + _RESOLUTION_NS
    spans = sorted((line.begin, -line.end) for line in lines if line is not whole and whole.begin < line.end <= last)
    total = until = 0
    for begin, negative_end in spans:
        if -negative_end > until:
            until = -negative_end
            total += until - begin
    return total / whole.d if whole.d else 0.0


def num_ends(lines: Iterable[VerlLine]) -> int:
    """How often a request ended at one worker."""
    return max(Counter(line.worker for line in lines if line.event == COMPLETE).values(), default=0)


def add_unlisted(step: ProfileStep, of_workers: Iterable[VerlLine]) -> bool:
    """Add the requests that only the lines about monitoring count. Returns False if these count too few."""
    told: Counter[str] = Counter()
    thrown: Counter[str] = Counter()
    once = {(line.worker, line.end): line for line in of_workers if line.event == MONITORING}
    for line in once.values():
        if (number := number_of(line.info, "total_requests")) is not None:
            told[line.worker] += int(number)
            completed = number_of(line.info, "completed_count")
            thrown[line.worker] += int(number - (number if completed is None else completed))
    own: dict[str, list[Request]] = {worker: [] for worker in told}
    for request in step.requests:
        own.get(request.worker, []).append(request)
    for worker, listed in own.items():
        missing = max(told[worker] - len(listed), 0)
        step.num_unlisted += missing
        known = sum(request.ending == "aborted" for request in listed)
        step.num_unlisted_thrown += min(missing, max(thrown[worker] - known, 0))
    return all(len(listed) <= told[worker] for worker, listed in own.items())


class Completeness:
    """What is missing in a log, and in how many steps."""

    def __init__(self) -> None:
        self.without_total = self.miscounted = 0
        self._files: dict[int, set[str]] = {}

    def add(self, number: int, files: set[str], *, has_total: bool) -> None:
        """Note the names of the files of a step."""
        self._files[number] = files
        self.without_total += not has_total

    def notes(self) -> Iterator[str]:
        """One sentence for each thing that is missing."""
        all_steps = f"of {len(self._files)} steps"
        if self.without_total:
            yield (
                f"{self.without_total} {all_steps} have no {STEP_TOTAL} in the log: "
                "each is counted from its first start to its last end."
            )
        if self.miscounted:
            yield f"{self.miscounted} {all_steps} have lines of more requests than were monitored."
        if missing := self._missing_files():
            shown = [f"{name} (step {_listed(map(str, steps))})" for name, steps in missing.items()]
            yield f"Files are missing from the log: {_listed(shown)}."
        if gaps := self._missing_steps():
            yield f"Steps are missing from the log: {_listed(map(str, gaps))}."

    def _missing_files(self) -> dict[str, list[int]]:
        """By name, the steps without a file that most other steps have."""
        seen = Counter(name for files in self._files.values() for name in files)
        usual = [name for name, number in sorted(seen.items()) if len(self._files) / 2 < number < len(self._files)]
        return {name: [number for number, files in self._files.items() if name not in files] for name in usual}

    def _missing_steps(self) -> list[int]:
        """The numbers between steps that are numbered one by one, not at longer distances."""
        skipped = [range(before + 1, number) for before, number in pairwise(self._files)]
        return [number for each in skipped for number in each] if 2 * sum(map(bool, skipped)) < len(skipped) else []


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:_NAMED]) + (f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")
