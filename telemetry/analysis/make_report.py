"""From a timeline to the report, one step after the other: no more than one step is held at a time.

Of each step come its summary (``step_summary.py``) and its critical path (``critical_path.py``), then what
``findings/`` make of both.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis.findings.findings_builder import FindingsBuilder
from forebay.telemetry.analysis.report import ProfileReport, StepSummary
from forebay.telemetry.analysis.step_summary import summarise
from forebay.telemetry.analysis.timeline import ProfileStep, Timeline


def analyse(timeline: Timeline, *, step: str | None = None, worker: str | None = None) -> ProfileReport:
    """The report of all steps, or of one; of all workers, or of one. ``InvalidInput`` for a name that is not there."""
    report = ProfileReport(source=timeline.source)
    findings = FindingsBuilder(report)
    steps: list[str] = []
    workers: set[str] = set()
    with _collector_paused():
        for each in timeline.steps():
            steps.append(each.name)
            if step is not None and each.name != step:
                continue
            workers.update(request.worker for request in each.requests)
            seen = each if worker is None else only_worker(each, worker)
            summary = summarise(seen, whole=each)
            report.steps.append(summary)
            findings.add(seen, summary)
    _check_known("step", step, steps)
    _check_known("worker", worker, sorted(workers))
    _complete(report, timeline)
    findings.complete()
    return report


@contextmanager
def _collector_paused() -> Iterator[None]:
    """For as long as steps are gone over: theirs are many small objects, none of them in a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def only_worker(step: ProfileStep, worker: str) -> ProfileStep:
    """The step as far as ``worker`` had to do with it."""
    requests = [request for request in step.requests if request.worker == worker]
    return replace(step, requests=requests, worker_phases={worker: step.worker_phases.get(worker, {})})


def _check_known(what: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        shown = ", ".join(known if len(known) < 10 else [*known[:5], "…", known[-1]]) or "none"
        raise InvalidInput(f"no {what} {name!r}: there are {shown}", field=what)


def _complete(report: ProfileReport, timeline: Timeline) -> None:
    ended = [each for each in report.steps if not each.is_open] or report.steps
    report.num_steps = len(report.steps)
    report.num_requests = sum(each.num_requests for each in report.steps)
    report.total_s = sum(each.seconds for each in report.steps)
    report.phase_shares = mean_shares(ended, [1.0] * len(ended))
    report.phase_shares_by_time = mean_shares(ended, [each.seconds for each in ended])
    report.problems = [f"{each.file}:{each.line}: {each.what}" for each in timeline.problems.first]
    report.num_problems = timeline.problems.number
    report.notes = list(timeline.notes)


def mean_shares(steps: Sequence[StepSummary], weights: Sequence[float]) -> dict[str, float]:
    """The shares of phases over steps that tell any, the largest first; 100 in all."""
    sums: dict[str, float] = {}
    total = 0.0
    for step, weight in zip(steps, weights, strict=True):
        if step.phase_shares:
            total += weight
            for name, share in step.phase_shares.items():
                sums[name] = sums.get(name, 0.0) + share * weight
    if not total:
        return {}
    return dict(sorted(((name, share / total) for name, share in sums.items()), key=lambda item: -item[1]))
