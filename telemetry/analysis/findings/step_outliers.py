"""Steps that took far longer than the others, and whether anything found in them explains it."""

from collections import defaultdict
from collections.abc import Sequence

from forebay.telemetry.analysis.findings.wording import sentence
from forebay.telemetry.analysis.report import EventPath, Finding, StepSummary
from forebay.telemetry.analysis.robust import log_deviations, median
from forebay.telemetry.numbers import seconds_text

MIN_DEVIATION = 5.0
MIN_SHARE = 0.05
MIN_STEPS = 5
_HALF = 0.5


def over_steps(steps: Sequence[StepSummary], found: Sequence[Finding]) -> list[Finding]:
    """Marks them (``is_outlier``); a finding for each of which ``found`` explains less than half."""
    ended = [step for step in steps if not step.is_open]
    usual_s = median([step.seconds for step in ended])
    explained: dict[str, float] = defaultdict(float)
    for finding in found:
        explained[finding.path.step] += finding.seconds
    slow = []
    for step in outlier_steps(ended):
        step.is_outlier = True
        beyond_s = step.seconds - usual_s
        if explained[step.name] < _HALF * beyond_s:
            slow.append(_finding(step, usual_s, beyond_s))
    return slow


def outlier_steps(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Those whose duration lies more than ``MIN_DEVIATION`` deviations above the median, in logarithms."""
    if len(steps) < MIN_STEPS:
        return []
    seconds = [step.seconds for step in steps]
    usual_s = median(seconds)
    return [
        step
        for step, deviation in zip(steps, log_deviations(seconds), strict=True)
        if deviation > MIN_DEVIATION and step.seconds - usual_s > MIN_SHARE * step.seconds
    ]


def _finding(step: StepSummary, usual_s: float, beyond_s: float) -> Finding:
    parts = [("training", step.train_s), ("waiting for rollouts", step.wait_s), ("sending", step.send_s)]
    known = [f"{seconds_text(seconds)} {name}" for name, seconds in parts if seconds]
    text = f"it took {seconds_text(step.seconds)} where {seconds_text(usual_s)} are usual"
    text += f" ({', '.join(known)})" if known else ""
    return Finding(
        cause="slow_step",
        seconds=beyond_s,
        share=beyond_s / step.seconds,
        sentence=sentence(step.name, text, "slow_step"),
        path=EventPath(step=step.name),
    )
