"""Finds a worker that ends long after the others, which wait at the barrier, and the reason."""

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from forebay.telemetry.analysis.findings.engine_rates import EngineRates
from forebay.telemetry.analysis.findings.wording import sentence
from forebay.telemetry.analysis.report import EventPath, Finding, StepSummary
from forebay.telemetry.analysis.robust import MAD_TO_SIGMA, median
from forebay.telemetry.analysis.timeline import ProfileStep, Request
from forebay.telemetry.numbers import seconds_text

_GENERATING = ("async_generate", "engine_async_generate")
_MIN_DEVIATION = 5.0
_MIN_SPREAD = 0.05
_CLEARLY = 1.2
"""A worker must have more work, or be slower, by this factor before that is reported as the reason."""


def late_worker(step: ProfileStep, summary: StepSummary) -> Iterator[Finding]:
    """The finding, if the last worker ended after the others. Its seconds are the wait of a typical other worker."""
    ends = _ends(step)
    if len(ends) < 2 or (summary.wait_s is not None and summary.wait_s <= 0):
        return
    begin_s = min((request.begin_s for request in step.requests), default=0.0)
    last = max(ends, key=lambda worker: ends[worker])
    others = [end_s for worker, end_s in ends.items() if worker != last]
    if not _is_late(ends[last] - begin_s, [end_s - begin_s for end_s in others]):
        return
    seconds = ends[last] - median(others)
    if summary.wait_s is not None:
        seconds = min(seconds, summary.wait_s)
    if seconds <= 0 or summary.seconds <= 0:
        return
    text = f"worker {last} ended {seconds_text(seconds)} after the other {len(others)}, which waited for it"
    reason, advice = _reason(step, last)
    if step.requests and not advice:
        return
    advice = advice or "barrier"
    path = EventPath(step=summary.name, worker=last, event="barrier_wait")
    yield Finding(
        cause="barrier",
        seconds=seconds,
        share=seconds / summary.seconds,
        sentence=sentence(summary.name, text + reason, advice),
        path=path,
    )


def _is_late(last_s: float, others_s: list[float]) -> bool:
    """Whether it ended outside the spread of the others: the last of a few is always somewhat late."""
    logs = [math.log(max(seconds, 1e-9)) for seconds in others_s]
    usual = median(logs)
    spread = max(MAD_TO_SIGMA * median([abs(value - usual) for value in logs]), _MIN_SPREAD)
    return math.log(max(last_s, 1e-9)) - usual > _MIN_DEVIATION * spread


def _ends(step: ProfileStep) -> dict[str, float]:
    """When each worker ended all its requests; for a log without requests, how long each generated."""
    ends: dict[str, float] = {}
    for request in step.requests:
        if request.ending != "aborted" and request.is_used:
            ends[request.worker] = max(ends.get(request.worker, 0.0), request.end_s)
    if ends:
        return ends
    found = {
        worker: sum(phases.get(name, 0.0) for name in _GENERATING) for worker, phases in step.worker_phases.items()
    }
    return {worker: seconds for worker, seconds in found.items() if seconds > 0}


def _reason(step: ProfileStep, late: str) -> tuple[str, str]:
    """The reason as text, and which advice fits: "" if only its last request was late, which is normal."""
    by_worker: dict[str, list[Request]] = defaultdict(list)
    for request in step.requests:
        by_worker[request.worker].append(request)
    if len(by_worker) < 2:
        return "", ""
    own = by_worker.pop(late)
    number = fmean(len(others) for others in by_worker.values())
    if len(own) > _CLEARLY * number:
        return f": it had {len(own)} requests, they had {number:.0f} each", "barrier"
    tokens = fmean(request.sampled_tokens for request in own)
    usual = fmean(request.sampled_tokens for others in by_worker.values() for request in others)
    if usual and tokens > _CLEARLY * usual:
        return f": its answers had {tokens:.0f} tokens, theirs {usual:.0f}", "barrier"
    rates = EngineRates(step.requests)
    speed = rates.tokens_per_s(late)
    speeds = [found for worker in by_worker if (found := rates.tokens_per_s(worker))]
    if rates.knows_tokens and speed and speeds and fmean(speeds) > _CLEARLY * speed:
        return f": its engine made {speed:.0f} tokens/s per request, theirs {fmean(speeds):.0f}", "slow_rate"
    own_s, usual_s = _usual_end(own), median([_usual_end(others) for others in by_worker.values()])
    return f": its last request was {max(own, key=lambda request: request.end_s).request_id}", (
        "barrier" if own_s > _CLEARLY * usual_s else ""
    )


def _usual_end(requests: list[Request]) -> float:
    """When half of them had ended, relative to the first begin."""
    return median([request.end_s for request in requests]) - min(request.begin_s for request in requests)
