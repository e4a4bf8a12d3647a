"""Builds the report from a timeline, step by step: only one step is in memory at a time.

For each step: the summary (``step_summary.py``) with its critical path (``critical_path.py``), then curves, gaps and
outliers, and the findings (``findings/``). Findings are ranked by the seconds they cost. Recurring ones are merged.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from forebay.core.errors import InvalidInput
from forebay.telemetry.analysis import completion, general_sentences
from forebay.telemetry.analysis.findings import request_outliers, run_findings, step_findings
from forebay.telemetry.analysis.lanes import CostliestSteps
from forebay.telemetry.analysis.report import Finding, OutlierRequest, ProfileReport, StepSummary
from forebay.telemetry.analysis.step_summary import summarise
from forebay.telemetry.analysis.timeline import ProfileStep, Timeline
from forebay.telemetry.analysis.trust import Distrust
from forebay.telemetry.analysis.what_if import WhatIfs
from forebay.telemetry.numbers import seconds_text, share_text

MAX_FINDINGS = 50
_MAX_OUTLIERS = 200
_MAX_GAPS = 500
_PER_STEP = 10
_RECURS = 3
"""The same cause in this many steps becomes one finding."""


def analyse(timeline: Timeline, *, step: str | None = None, worker: str | None = None) -> ProfileReport:
    """A report on all steps or one, and on all workers or one. Raises ``InvalidInput`` for an unknown name."""
    report = ProfileReport(source=timeline.source)
    found: list[Finding] = []
    what_ifs = WhatIfs()
    costliest = CostliestSteps()
    steps: list[str] = []
    workers: set[str] = set()
    distrust = Distrust()
    with _collector_paused():
        for each in timeline.steps():
            steps.append(each.name)
            distrust.look(each)
            if step is not None and each.name != step:
                continue
            workers.update(request.worker for request in each.requests)
            seen = each if worker is None else _only_worker(each, worker)
            summary = summarise(seen, whole=each)
            own = _add_step(report, seen, summary)
            found += own
            what_ifs.add(seen, summary)
            costliest.add(seen, summary, own)
            del each, seen  # frees the step before the next one is read
    _check_known("step", step, steps)
    _check_known("worker", worker, sorted(workers))
    _complete(report, timeline)
    _add_findings(report, found, what_ifs)
    report.findings = [finding for finding in report.findings if not distrust.hides(finding)]
    report.notes += distrust.notes()
    report.lanes = costliest.results()
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


def _add_step(report: ProfileReport, step: ProfileStep, summary: StepSummary) -> list[Finding]:
    """The findings of ``step``, of which nothing else is kept."""
    gaps = completion.gaps_of(step, summary)
    outliers = request_outliers.per_step(step, summary, gaps)
    report.steps.append(summary)
    report.curves += completion.curves_of(step, summary)
    report.gaps += gaps
    report.outliers += outliers
    if len(report.outliers) > 2 * _MAX_OUTLIERS:
        report.outliers = _worst(report.outliers)
    return step_findings.per_step(step, summary, outliers, gaps)[:_PER_STEP]


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


def _add_findings(report: ProfileReport, found: list[Finding], what_ifs: WhatIfs) -> None:
    """Combine the findings of single steps (``found``) with those that need all steps."""
    steps = report.steps
    report.outliers = _worst(report.outliers)
    report.gaps = sorted(report.gaps, key=lambda gap: gap.begin_s - gap.end_s)[:_MAX_GAPS]
    report.whatifs = what_ifs.results()
    report.constant_phases = run_findings.constant_phases(steps)
    slow = run_findings.slow_steps(steps, found)
    constant = run_findings.of_constant_phases(report.constant_phases, steps)
    report.findings = ranked([*found, *slow, *constant], steps)
    report.sentences = [*general_sentences.over_steps(steps), *what_ifs.sentences()]
    report.sentences += [phase.sentence for phase in report.constant_phases]


def _worst(outliers: list[OutlierRequest]) -> list[OutlierRequest]:
    return sorted(outliers, key=lambda outlier: -outlier.cause_s)[:_MAX_OUTLIERS]


def ranked(found: Sequence[Finding], steps: Sequence[StepSummary]) -> list[Finding]:
    """Most expensive first. A cause in ``_RECURS`` steps or more becomes one finding, which names the worst step."""
    total_s = sum(step.seconds for step in steps)
    by_cause: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in found:
        by_cause[finding.cause, finding.path.event].append(finding)
    merged: list[Finding] = []
    for own in by_cause.values():
        num_steps = len({finding.path.step for finding in own})
        if num_steps >= _RECURS and own[0].cause != "slow_step":
            merged.append(_together(own, num_steps, len(steps), total_s))
        else:
            merged += own
    return sorted(merged, key=lambda finding: -finding.seconds)[:MAX_FINDINGS]


def _together(own: Sequence[Finding], num_steps: int, of: int, total_s: float) -> Finding:
    worst = max(own, key=lambda finding: finding.seconds)
    seconds = sum(finding.seconds for finding in own)
    share = seconds / total_s if total_s > 0 else 0.0
    text = f"In {num_steps} of {of} steps, {seconds_text(seconds)} in all ({share_text(share)}). "
    return Finding(
        cause=worst.cause,
        seconds=seconds,
        share=share,
        sentence=text + "Worst: " + worst.sentence[:1].lower() + worst.sentence[1:],
        path=worst.path,
    )


def _mean_shares(steps: Sequence[StepSummary], weights: Sequence[float]) -> dict[str, float]:
    """Mean shares of phases over the steps that have any, largest first; 100 in all."""
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
