"""What costs a step as a whole: a late trainer, small reads, a blocked loop, hooks, delivery, a late worker, waste."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from statistics import fmean

from forebay.telemetry.analysis.causes.request_excess import MIN_DEVIATION
from forebay.telemetry.analysis.causes.wording import CAP_ADVICE, of_step
from forebay.telemetry.analysis.critical_path import CriticalPath
from forebay.telemetry.analysis.intervals import covered_within
from forebay.telemetry.analysis.report import EventPath, Finding, StepSummary
from forebay.telemetry.analysis.robust import deviation_of, median
from forebay.telemetry.analysis.timeline import ProfileStep, Request, Standstill
from forebay.telemetry.numbers import seconds_text, share_text

_GENERATING = ("async_generate", "engine_async_generate")
_SPREAD, _MAX_SPREAD = 0.05, 0.5
_MORE = 1.2
"""A worker must have more requests, and end most of them later, by this factor before its load is the reason."""
_FAR_MORE = 2.0
_FEW_READS = _FEW_REQUESTS = 3
_HALF = 0.5
_OF_REPLY = {
    "hooks": "the hooks took {} to judge its groups",
    "write": "its reply waited {} until the lease of its groups was on the buffer's disk",
    "delivery": "its reply took {} to send",
}
"""Phases of making a reply."""


def costs_of(step: ProfileStep, summary: StepSummary, path: CriticalPath) -> Iterator[Finding]:
    """All of them but the late worker; the caller leaves out those that cost too little."""
    yield from _late_trainer(step, summary)
    yield from _small_reads(step, summary)
    yield from _blocked_loops(step, summary, path)
    yield from _phases_of_workers(step, summary)
    yield from _waste(step, summary)
    for cause, words in _OF_REPLY.items():
        seconds = step.delivery_phases.get(cause, 0.0)
        if seconds > 0:
            yield of_step(summary, cause, seconds, words.format(seconds_text(seconds)), EventPath(event=cause))


def _late_trainer(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    """The trainer asked late, and meanwhile nothing was generated. If rollouts went on, it kept up with them."""
    ready = _delivered(step)
    if step.is_open or step.asked_s is None or step.released_by or not ready or len(step.reads) >= _FEW_READS:
        return
    # Groups that were ready before the previous step ended waited for that step, not for this request.
    late_s = step.asked_s - max(step.begin_s, *ready)
    if step.idle_s is not None:
        late_s = min(late_s, step.idle_s)
    if late_s > 0:
        num = len(ready)
        last = f"the last of its {num} groups" if num > 1 else "its group"
        text = f"the trainer asked {seconds_text(late_s)} after {last} was ready: the rollouts waited for it"
        yield of_step(summary, "late_trainer", late_s, text, EventPath(event="train"))


def _small_reads(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    """Reads that returned few groups although more were ready. One read could have returned all when the last was."""
    reads = sorted(step.reads, key=lambda read: read.asked_s)
    ready = _delivered(step)
    if len(reads) < _FEW_READS or not ready:
        return
    num_small = sum(
        any(step.ready_s.get(group, later.sent_s) <= read.asked_s for later in reads[place:] for group in later.groups)
        for place, read in enumerate(reads[:-1], 1)
    )
    if num_small < _HALF * (len(reads) - 1):
        return
    seconds = reads[-1].sent_s - max(reads[0].asked_s, *ready)
    per_read = fmean(len(read.groups) for read in reads)
    text = (
        f"the trainer read its {len(ready)} groups in {len(reads)} reads of {per_read:.3g}, although more "
        f"were ready: the last one ended {seconds_text(seconds)} after all groups were ready"
    )
    yield of_step(summary, "small_reads", seconds, text, EventPath(event="read"))


def _delivered(step: ProfileStep) -> list[float]:
    """When each group was ready that the step's reads delivered."""
    groups = [group for read in step.reads for group in read.groups] or list(step.ready_s)
    return [step.ready_s[group] for group in groups if group in step.ready_s]


def _blocked_loops(step: ProfileStep, summary: StepSummary, path: CriticalPath) -> Iterator[Finding]:
    """Counts the part on the critical path; without waits, all of it within the step."""
    by_process: dict[str, list[Standstill]] = defaultdict(list)
    for each in step.standstills:
        by_process[each.process].append(each)
    waits = [(wait.begin_s, wait.end_s) for wait in path.waits if wait.request] or [(step.begin_s, step.end_s)]
    for process, stalls in by_process.items():
        spans = [(each.begin_s, each.end_s) for each in stalls]
        seconds = sum(covered_within(spans, begin_s, end_s) for begin_s, end_s in waits)
        longest = max(stalls, key=lambda each: each.end_s - each.begin_s)
        where = f", last in {longest.stack[-1]}" if longest.stack else ""
        text = f"the event loop of the {process} process was blocked for {seconds_text(seconds)}{where}"
        yield of_step(summary, "blocked_loop", seconds, text, EventPath(event=longest.stack[-1] if where else process))


def _phases_of_workers(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    """A phase outside requests that took far longer on one worker than on the others."""
    by_phase: dict[str, dict[str, float]] = defaultdict(dict)
    for worker, phases in step.worker_phases.items():
        for name, seconds in phases.items():
            if name != "barrier_wait" and not (step.requests and name in _GENERATING):
                by_phase[name][worker] = seconds
    for name, by_worker in by_phase.items():
        late = _late_one(by_worker)
        if late is None:
            continue
        worker, seconds = late
        path = EventPath(worker=worker, event=name)
        if name in _GENERATING:
            text = f"worker {worker} ended {seconds_text(seconds)} after the other {len(by_worker) - 1}"
            yield of_step(summary, "barrier", seconds, f"{text}, which waited for it", path)
        else:
            text = f"{name} took {seconds_text(by_worker[worker])} on worker {worker}, {seconds_text(seconds)} longer"
            yield of_step(summary, "slow_step", seconds, f"{text} than on the others, which waited for it", path)


def _late_one(by_worker: Mapping[str, float], slow: Collection[str] = ()) -> tuple[str, float] | None:
    """The worker whose seconds are far above those of the others, and by how much; of ``slow`` ones just the last."""
    if len(by_worker) < 2:
        return None
    last = max(by_worker, key=lambda worker: by_worker[worker])
    others = [seconds for worker, seconds in by_worker.items() if worker != last]
    if last not in slow and deviation_of(by_worker[last], others, _SPREAD, _MAX_SPREAD) <= MIN_DEVIATION:
        return None
    return last, by_worker[last] - median(others)


def late_worker(step: ProfileStep, summary: StepSummary, path: CriticalPath, slow: Collection[str]) -> Finding | None:
    """The worker that ended last, long after the others or because it is ``slow``, and had more requests than they."""
    by_worker: dict[str, list[Request]] = defaultdict(list)
    for request in step.requests:
        if request.ending != "aborted" and request.is_used:
            by_worker[request.worker].append(request)
    begin_s = min((request.begin_s for request in step.requests), default=0.0)
    ends = {worker: max(each.end_s for each in own) - begin_s for worker, own in by_worker.items()}
    usual = median([float(len(own)) for own in by_worker.values()])
    crowded = {worker for worker, own in by_worker.items() if len(own) >= _FAR_MORE * usual}
    late = _late_one(ends, {*slow, *crowded})
    if late is None or not any(wait.request for wait in path.waits):
        return None
    worker, seconds = late
    others = [own for name, own in by_worker.items() if name != worker]
    number = fmean(map(len, others))
    # A single request that ends late has another reason than the number of requests.
    middle_s = {name: median([each.end_s for each in own]) - begin_s for name, own in by_worker.items()}
    is_late = middle_s.pop(worker) > _MORE * median(list(middle_s.values()))
    if not is_late or len(by_worker[worker]) <= max(_MORE * number, _FEW_REQUESTS):
        return None
    if summary.wait_s is not None:
        seconds = min(seconds, summary.wait_s)
    text = (
        f"worker {worker} ended {seconds_text(seconds)} after the other {len(by_worker) - 1}, which waited for it: "
        f"it had {len(by_worker[worker])} requests, they had {number:.0f} each"
    )
    return of_step(summary, "barrier", seconds, text, EventPath(worker=worker, event="barrier_wait"))


def _waste(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    """Requests and attempts that no sample came of. They cost the step their share of the time of all requests."""

    def spent(seconds: float, tokens: int) -> str:
        return f"took {seconds_text(seconds)} and {tokens:,} tokens"

    total_s = sum(request.duration_s for request in step.requests) or 1.0
    num_discarded = sum(summary.discarded_requests.values())
    parts = []
    if number := summary.thrown_requests:
        wanted = summary.num_requests - num_discarded
        cost = spent(summary.thrown_s, summary.thrown_tokens)
        parts.append(f"{summary.num_used:,} of {wanted:,} requests were used; {number} that were thrown away {cost}")
    if number := summary.broken_attempts:
        cost = spent(summary.broken_s, summary.broken_tokens)
        parts.append(f"{number:,} attempts that were stopped at their cap and run again {cost}")
    if parts:
        share = (summary.thrown_s + summary.broken_s) / total_s
        text = f"{'; '.join(parts)} ({share_text(share)} of all request time)"
        advice = CAP_ADVICE if summary.broken_s > summary.thrown_s else ""
        yield of_step(summary, "over_sampling", share * summary.seconds, text, EventPath(event="aborted"), advice)
    if num_discarded:
        share = summary.discarded_s / total_s
        reasons = ", ".join(f"{number:,} {why}" for why, number in summary.discarded_requests.items())
        cost = spent(summary.discarded_s, summary.discarded_tokens)
        text = f"of {summary.num_requests:,} requests, those of discarded groups ({reasons}) {cost}"
        text += f" ({share_text(share)} of all request time)"
        yield of_step(summary, "discarded", share * summary.seconds, text, EventPath(event="discarded"))
