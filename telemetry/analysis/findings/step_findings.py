"""What cost one step its time: outlier requests, gaps, blocked loops, a late worker or trainer, surplus requests."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from forebay.telemetry.analysis.findings.engine_rates import WORKING
from forebay.telemetry.analysis.findings.late_workers import late_worker
from forebay.telemetry.analysis.findings.request_causes import CAUSES_OF_PHASES
from forebay.telemetry.analysis.findings.wording import CAP_ADVICE, sentence
from forebay.telemetry.analysis.intervals import covered
from forebay.telemetry.analysis.report import EventPath, Finding, Gap, OutlierRequest, StepSummary
from forebay.telemetry.analysis.timeline import ProfileStep
from forebay.telemetry.numbers import seconds_text, share_text

MIN_SHARE = 0.05
"""Share of the step; a smaller cost is not reported."""
MIN_S = 0.1
"""A smaller cost is not reported: a tenth of a second is not worth an investigation."""
_WORK_SHARE = 0.25
"""Tools and agents are the purpose of a rollout. On a step's critical path they are reported above this share."""
_WORK = ("tool", "agent", "hold")
_HALF = 0.5


def per_step(
    step: ProfileStep, summary: StepSummary, outliers: Sequence[OutlierRequest], gaps: Sequence[Gap]
) -> list[Finding]:
    """The findings that cost at least a twentieth of the step, largest first. Each second is counted once."""
    found = [*_late_trainer(step, summary), *_blocked_loops(step, summary)]
    found += [_of_gap(step, summary, gap, gaps) for gap in _longest_by_place(gaps)]
    found += _unexplained(_of_outliers(summary, outliers), found)
    found += _unexplained(_on_the_path(summary), found)
    found += _unexplained(late_worker(step, summary), found)
    found += [*_over_sampling(step, summary), *_discarded(step, summary), *_sending(step, summary)]
    known = [finding for finding in found if finding.share >= MIN_SHARE and finding.seconds >= MIN_S]
    return sorted(known, key=lambda finding: -finding.seconds)


def _finding(summary: StepSummary, cause: str, seconds: float, text: str, path: EventPath, advice: str = "") -> Finding:
    path.step = summary.name
    share = seconds / summary.seconds if summary.seconds > 0 else 0.0
    whole = sentence(summary.name, text, cause, advice)
    return Finding(cause=cause, seconds=seconds, share=share, sentence=whole, path=path)


def _unexplained(candidates: Iterable[Finding], found: Sequence[Finding]) -> Iterator[Finding]:
    """Skip findings whose seconds are already explained by another finding of the same place or cause."""
    for candidate in candidates:
        if not any(_explains(other, candidate) for other in found):
            yield candidate


def _explains(other: Finding, candidate: Finding) -> bool:
    if other.seconds < _HALF * candidate.seconds or other.cause == "late_trainer":
        return False
    if other.cause == "blocked_loop":
        # A blocked loop prolongs everything that was open: tools, calls and waits.
        return True
    if other.cause == candidate.cause and other.cause != "stalled_engine":
        return True
    return bool(other.path.worker) and other.path.worker == candidate.path.worker


def _late_trainer(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    if step.asked_s is None or step.released_by or not step.ready_s:
        return
    # Groups that were ready before the previous step ended waited for that step, not for this request.
    ready_s = max(step.begin_s, *step.ready_s.values())
    late_s = step.asked_s - ready_s
    if late_s > 0:
        text = (
            f"the trainer asked {seconds_text(late_s)} after {_last_of(len(step.ready_s))} was ready: "
            "the rollouts waited for it"
        )
        yield _finding(summary, "late_trainer", late_s, text, EventPath(event="train"))


def _last_of(num_groups: int) -> str:
    return f"the last of its {num_groups} groups" if num_groups > 1 else "its group"


def _blocked_loops(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    by_process: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in step.standstills:
        by_process[one.process].append((max(one.begin_s, step.begin_s), min(one.end_s, step.end_s)))
    for process, spans in by_process.items():
        seconds = covered(spans)
        longest = max(
            (one for one in step.standstills if one.process == process), key=lambda one: one.end_s - one.begin_s
        )
        where = f", last in {longest.stack[-1]}" if longest.stack else ""
        text = f"the event loop of the {process} process was blocked for {seconds_text(seconds)}{where}"
        yield _finding(summary, "blocked_loop", seconds, text, EventPath(event=longest.stack[-1] if where else process))


def _longest_by_place(gaps: Sequence[Gap]) -> list[Gap]:
    """The longest gap of each worker; ``gaps`` are ordered longest first."""
    return list({gap.worker: gap for gap in reversed(gaps)}.values())


def _of_gap(step: ProfileStep, summary: StepSummary, gap: Gap, gaps: Sequence[Gap]) -> Finding:
    same = [other for other in gaps if other.worker == gap.worker]
    seconds = sum(other.end_s - other.begin_s for other in same)
    what = "was stalled" if gap.is_standstill else "was slow"
    text = (
        f"no request of worker {gap.worker} ended from {seconds_text(gap.begin_s)} to {seconds_text(gap.end_s)} "
        f"({seconds_text(gap.end_s - gap.begin_s)}), between {gap.rate_before:.1f} requests a second before "
        f"({gap.num_before} ended) and {gap.rate_after:.1f} after ({gap.num_after}): the worker {what}"
    )
    if len(same) > 1:
        text += f"; this happened {len(same)} times, for {seconds_text(seconds)} in total"
    cause, event = _cause_of_gap(step, gap)
    return _finding(summary, cause, seconds, text, EventPath(worker=gap.worker, event=event))


def _cause_of_gap(step: ProfileStep, gap: Gap) -> tuple[str, str]:
    """The cause, from what the worker's open requests did meanwhile; ``gap`` if unknown."""
    begin_s = min(request.begin_s for request in step.requests)
    left, right = begin_s + gap.begin_s, begin_s + gap.end_s
    seconds: dict[str, float] = defaultdict(float)
    for request in step.requests:
        if request.worker == gap.worker and request.end_s > left:
            for event in request.events:
                seconds[event.name] += max(0.0, min(event.end_s, right) - max(event.begin_s, left))
    phase = max(seconds, key=lambda name: seconds[name], default="")
    if not phase or seconds[phase] < _HALF * (right - left):
        return "gap", ""
    if phase in WORKING:
        return ("stalled_engine" if gap.is_standstill else "slow_rate"), phase
    return CAUSES_OF_PHASES.get(phase, "agent"), phase


def _of_outliers(summary: StepSummary, outliers: Sequence[OutlierRequest]) -> Iterator[Finding]:
    """One finding for all requests of a step with the same cause; causes in an engine are grouped by engine, too."""
    places: dict[tuple[str, str], list[OutlierRequest]] = defaultdict(list)
    for outlier in outliers:
        is_engine = outlier.cause in ("stalled_engine", "slow_rate", "engine_away")
        places[outlier.cause, outlier.worker if is_engine else ""].append(outlier)
    for (cause, _), own in places.items():
        worst = max(own, key=lambda outlier: outlier.cause_s)
        path = EventPath(
            worker=worst.worker, group=worst.group, request=worst.request, turn=worst.turn, event=worst.cause_event
        )
        text = worst.sentence + (f"; so did {len(own) - 1} more" if len(own) > 1 else "")
        yield _finding(summary, cause, worst.cause_s, text, path)


def _on_the_path(summary: StepSummary) -> Iterator[Finding]:
    """What a step waited for besides an engine, even if no request took longer than comparable ones."""
    parts = [part for part in summary.critical_path if part.path.request and part.path.event not in WORKING]
    seconds: dict[str, float] = defaultdict(float)
    for part in parts:
        seconds[CAUSES_OF_PHASES.get(part.path.event, "agent")] += part.seconds
    for cause, total_s in seconds.items():
        if cause in _WORK and total_s < _WORK_SHARE * summary.seconds:
            continue
        own = [part for part in parts if CAUSES_OF_PHASES.get(part.path.event, "agent") == cause]
        longest = max(own, key=lambda part: part.seconds).path
        place = EventPath(
            worker=longest.worker, group=longest.group, request=longest.request, turn=longest.turn, event=longest.event
        )
        text = f"it waited {seconds_text(total_s)} for {longest.event} of request {longest.request}, which ended last"
        yield _finding(summary, cause, total_s, text, place)


def _over_sampling(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    if not summary.thrown_requests and not summary.broken_attempts:
        return
    total_s = sum(request.duration_s for request in step.requests)
    lost_s = summary.thrown_s + summary.broken_s
    share = lost_s / total_s if total_s > 0 else 0.0
    parts = []
    if summary.thrown_requests:
        wanted = summary.num_requests - sum(summary.discarded_requests.values())
        parts.append(
            f"{wanted - summary.thrown_requests} of {wanted:,} requests were used; "
            f"the other {summary.thrown_requests} took "
            f"{seconds_text(summary.thrown_s)} and {summary.thrown_tokens:,} tokens"
        )
    if summary.broken_attempts:
        parts.append(
            f"{summary.broken_attempts:,} attempts that were stopped at their cap and run again took "
            f"{seconds_text(summary.broken_s)} and {summary.broken_tokens:,} tokens"
        )
    text = f"{'; '.join(parts)} ({share_text(share)} of all request time)"
    advice = CAP_ADVICE if summary.broken_s > summary.thrown_s else ""
    yield _finding(summary, "over_sampling", share * summary.seconds, text, EventPath(event="aborted"), advice)


def _discarded(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    if not summary.discarded_requests:
        return
    total_s = sum(request.duration_s for request in step.requests)
    share = summary.discarded_s / total_s if total_s > 0 else 0.0
    reasons = ", ".join(f"{number:,} {why}" for why, number in summary.discarded_requests.items())
    text = (
        f"of {summary.num_requests:,} requests, those of discarded groups ({reasons}) took "
        f"{seconds_text(summary.discarded_s)} and {summary.discarded_tokens:,} tokens "
        f"({share_text(share)} of all request time)"
    )
    yield _finding(summary, "discarded", share * summary.seconds, text, EventPath(event="discarded"))


def _sending(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    for cause, words in (("hooks", "the hooks took {} to judge its groups"), ("delivery", "its reply took {} to send")):
        seconds = step.delivery_phases.get(cause, 0.0)
        if seconds > 0:
            yield _finding(summary, cause, seconds, words.format(seconds_text(seconds)), EventPath(event=cause))
