"""What a report says first: every step's findings, ranked by the seconds they cost, told together where they recur.

``FindingsBuilder`` is given one step after the other; it adds curves, gaps and outliers to the report.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from forebay.telemetry.analysis import completion_curves, completion_gaps, general_sentences
from forebay.telemetry.analysis.findings import constant_phases, request_outliers, step_findings, step_outliers
from forebay.telemetry.analysis.findings.wording import ADVICE
from forebay.telemetry.analysis.report import EventPath, Finding, OutlierRequest, ProfileReport, StepSummary
from forebay.telemetry.analysis.timeline import ProfileStep
from forebay.telemetry.analysis.what_if import WhatIfs
from forebay.telemetry.numbers import seconds_text, share_text

MIN_SHARE = 0.05
MAX_FINDINGS = 50
_MAX_OUTLIERS = 200
_MAX_GAPS = 500
_PER_STEP = 10
_RECURS = 3
"""In so many steps the same is one finding."""


class FindingsBuilder:
    """Adds to ``report`` what this half of the analysis finds, one step at a time."""

    def __init__(self, report: ProfileReport) -> None:
        self._report = report
        self._found: list[Finding] = []
        self._what_ifs = WhatIfs()

    def add(self, step: ProfileStep, summary: StepSummary) -> None:
        """Take in a step and its summary; nothing of ``step`` is kept."""
        gaps = completion_gaps.per_step(step, summary)
        outliers = request_outliers.per_step(step, summary, gaps)
        self._report.curves += completion_curves.per_step(step, summary)
        self._report.gaps += gaps
        self._report.outliers += outliers
        self._found += step_findings.per_step(step, summary, outliers, gaps)[:_PER_STEP]
        self._what_ifs.add(step, summary)
        if len(self._report.outliers) > 2 * _MAX_OUTLIERS:
            self._report.outliers = _worst(self._report.outliers)

    def complete(self) -> None:
        """Once all steps are in, and their summaries are ``report.steps``."""
        report = self._report
        report.outliers = _worst(report.outliers)
        report.gaps = sorted(report.gaps, key=lambda gap: gap.begin_s - gap.end_s)[:_MAX_GAPS]
        report.whatifs = self._what_ifs.results()
        report.constant_phases = constant_phases.over_steps(report.steps)
        slow = step_outliers.over_steps(report.steps, self._found)
        report.findings = ranked([*self._found, *slow, *_of_constant_phases(report)], report.steps)
        report.sentences = [*general_sentences.over_steps(report.steps), *self._what_ifs.sentences()]
        report.sentences += [phase.sentence for phase in report.constant_phases]


def _worst(outliers: list[OutlierRequest]) -> list[OutlierRequest]:
    return sorted(outliers, key=lambda outlier: -outlier.cause_s)[:_MAX_OUTLIERS]


def ranked(found: Sequence[Finding], steps: Sequence[StepSummary]) -> list[Finding]:
    """The dearest first. The same cause in ``_RECURS`` steps or more is one finding, which names the worst of them."""
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


def _of_constant_phases(report: ProfileReport) -> list[Finding]:
    found = []
    number = len(report.steps)
    for phase in report.constant_phases:
        share = fmean(step.phase_shares.get(phase.name, 0.0) for step in report.steps) / 100
        if share >= MIN_SHARE:
            seconds = phase.mean_s * number
            text = f"{phase.name} takes {seconds_text(phase.mean_s)} in each of {number} steps, {share_text(share)} of "
            text += f"their time, however much is generated. {ADVICE['constant_phase']}"
            found.append(
                Finding(
                    cause="constant_phase",
                    seconds=seconds,
                    share=share,
                    sentence=text,
                    path=EventPath(event=phase.name),
                )
            )
    return found
