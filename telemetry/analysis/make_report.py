"""Builds the report from a timeline, step by step: only one step is in memory at a time.

For each step: its critical path (``critical_path.py``), its summary (``step_summary.py``), curves and gaps, and what it
waited for (``causes/``). Findings are ranked by the seconds they cost. Recurring ones are merged.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis import step_summary
from forebay.telemetry.analysis.causes import step_trends
from forebay.telemetry.analysis.causes.engine_totals import EngineTotals
from forebay.telemetry.analysis.causes.explain_step import explain
from forebay.telemetry.analysis.causes.failures import Failures
from forebay.telemetry.analysis.causes.request_excess import UsualRequest
from forebay.telemetry.analysis.completion import completion_of
from forebay.telemetry.analysis.critical_path import critical_path
from forebay.telemetry.analysis.lanes import CostliestSteps
from forebay.telemetry.analysis.report import Finding, OutlierRequest, ProfileReport, StepSummary
from forebay.telemetry.analysis.timeline import ProfileStep, Timeline
from forebay.telemetry.analysis.trust import Distrust
from forebay.telemetry.analysis.what_if import WhatIfs
from forebay.telemetry.numbers import seconds_text, share_text

MAX_FINDINGS = 50
_MAX_OUTLIERS = 60
_MAX_GAPS = 500
_PER_STEP = 10
_RECURS = 2
"""The same cause in this many steps becomes one finding."""
_OF_ENGINES = ("slow_engine", "cold_cache", "network", "slow_rate", "stalled_engine", "barrier")


def analyse(timeline: Timeline, *, step: str | None = None, worker: str | None = None) -> ProfileReport:
    """A report on all steps or one, and on all workers or one. Raises ``InvalidInput`` for an unknown name."""
    report = ProfileReport(source=timeline.source)
    run = _WholeRun(is_whole=step is None)
    steps: list[str] = []
    workers: set[str] = set()
    with _collector_paused():
        for each in timeline.steps():
            steps.append(each.name)
            run.distrust.look(each)
            if step is not None and each.name != step:
                if not report.steps:  # earlier calls help to judge the engines of the step
                    run.earlier.add(UsualRequest(each, run.earlier.calls).book, each.requests)
                continue
            workers.update(request.worker for request in each.requests)
            _add_step(report, run, each, worker)
            del each  # frees the step before the next one is read
    _check_known("step", step, steps)
    _check_known("worker", worker, sorted(workers))
    _complete(report, timeline)
    _add_findings(report, run)
    return report


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection while steps are processed: they consist of many small objects without cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _only_worker(step: ProfileStep, worker: str) -> ProfileStep:
    """The part of the step that concerns ``worker``."""
    requests = [request for request in step.requests if request.worker == worker]
    phases = {worker: step.worker_phases.get(worker, {})}
    return replace(step, requests=requests, worker_phases=phases, num_unlisted=0, num_unlisted_thrown=0)


def _check_known(what: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        shown = ", ".join(known if len(known) < 10 else [*known[:5], "…", known[-1]]) or "none"
        raise InvalidInput(f"there is no {what} {name!r} (known: {shown})", field=what)


class _WholeRun:
    """What is collected over all steps, or of the one that the report is about."""

    def __init__(self, *, is_whole: bool) -> None:
        self.found: list[Finding] = []
        """Findings of single steps."""
        self.unsure: list[Finding] = []
        self.what_ifs = WhatIfs()
        self.earlier = EngineTotals()
        self.engines = self.earlier if is_whole else EngineTotals()
        self.failures = Failures()
        self.costliest = CostliestSteps()
        self.distrust = Distrust()


def _add_step(report: ProfileReport, run: _WholeRun, whole: ProfileStep, worker: str | None) -> None:
    """Add what is kept of a step, or of its part that concerns ``worker``."""
    path = critical_path(whole)
    step = whole if worker is None else _only_worker(whole, worker)
    summary = step_summary.summarise(step, path)
    explained = explain(whole, summary, path, run.earlier.calls)
    summary.s_per_token = explained.book.s_per_token
    report.steps.append(summary)
    curves, gaps = completion_of(step, summary)
    report.curves += curves
    report.gaps += gaps
    report.outliers += explained.requests
    if len(report.outliers) > 2 * _MAX_OUTLIERS:
        report.outliers = _worst(report.outliers)
    run.found += explained.findings[:_PER_STEP]
    run.unsure += explained.unsure
    run.what_ifs.add(step, summary)
    run.engines.add(explained.book, whole.requests)
    run.failures.add(whole)
    run.costliest.add(step, summary, explained.findings)


def _complete(report: ProfileReport, timeline: Timeline) -> None:
    ended = [each for each in report.steps if not each.is_open] or report.steps
    report.num_steps = len(report.steps)
    report.num_requests = sum(each.num_requests for each in report.steps)
    report.total_s = sum(each.seconds for each in report.steps)
    report.phase_shares = _mean_shares(ended, [1.0] * len(ended))
    report.phase_shares_by_time = _mean_shares(ended, [each.seconds for each in ended])
    report.problems = [f"{each.file}:{each.line}: {each.what}" for each in timeline.problems.first]
    report.num_problems = timeline.problems.number
    report.notes = list(timeline.notes)


def _add_findings(report: ProfileReport, run: _WholeRun) -> None:
    """Combine the findings of single steps with those that need all steps."""
    steps = report.steps
    report.outliers = _worst(report.outliers)
    report.gaps = sorted(report.gaps, key=lambda gap: gap.begin_s - gap.end_s)[:_MAX_GAPS]
    report.whatifs = run.what_ifs.results()
    report.engines = run.engines.figures()
    report.lanes = run.costliest.results()
    constant = step_trends.constant_phases(steps)
    over_steps = step_trends.over_steps(steps, run.found, run.unsure)
    found = run.distrust.believed([*run.found, *over_steps, *constant])
    report.notes += run.distrust.notes()
    report.findings = [*run.failures.findings(steps), *ranked(found, steps)]
    report.sentences = [*run.failures.sentences(), *step_summary.over_steps(steps), *run.what_ifs.sentences()]


def _worst(outliers: list[OutlierRequest]) -> list[OutlierRequest]:
    return sorted(outliers, key=lambda outlier: -outlier.cause_s)[:_MAX_OUTLIERS]


def ranked(found: Sequence[Finding], steps: Sequence[StepSummary]) -> list[Finding]:
    """Most expensive first. A cause in ``_RECURS`` steps or more becomes one finding, which names the worst step."""
    total_s = sum(step.seconds for step in steps)
    by_cause: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in found:
        by_cause[finding.cause, _place_of(finding)].append(finding)
    merged: list[Finding] = []
    for own in by_cause.values():
        num_steps = len({finding.path.step for finding in own})
        if num_steps >= _RECURS and own[0].cause != "slow_step":
            merged.append(_together(own, num_steps, len(steps), total_s))
        else:
            merged += own
    return sorted(merged, key=lambda finding: -finding.seconds)[:MAX_FINDINGS]


def _place_of(finding: Finding) -> str:
    """The engine or worker if the cause is one's own, else the event."""
    return finding.path.worker if finding.cause in _OF_ENGINES else finding.path.event


def _together(own: Sequence[Finding], num_steps: int, of: int, total_s: float) -> Finding:
    worst = max(own, key=lambda finding: finding.seconds)
    seconds = sum(finding.seconds for finding in own)
    share = seconds / total_s if total_s > 0 else 0.0
    text = f"In {num_steps} of {of} steps, {seconds_text(seconds)} in all ({share_text(share)}). Worst: "
    text += worst.sentence[:1].lower() + worst.sentence[1:]
    return msgspec.structs.replace(worst, seconds=seconds, share=share, share_of="run", sentence=text)


def _mean_shares(steps: Sequence[StepSummary], weights: Sequence[float]) -> dict[str, float]:
    """Mean shares of phases over the steps that have any, largest first; 100 in all."""
    sums: dict[str, float] = defaultdict(float)
    total = 0.0
    for step, weight in zip(steps, weights, strict=True):
        total += weight if step.phase_shares else 0.0
        for name, share in step.phase_shares.items():
            sums[name] += share * weight
    return {name: sums[name] / total for name in sorted(sums, key=lambda name: -sums[name])} if total else {}
