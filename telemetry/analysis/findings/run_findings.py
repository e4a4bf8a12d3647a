"""Findings across all steps: steps that took far longer than others, and phases that always take the same time.

A phase whose time does not depend on the amount generated could be done once in advance.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from forebay.telemetry.analysis.findings.wording import ADVICE, sentence
from forebay.telemetry.analysis.report import ConstantPhase, EventPath, Finding, StepSummary
from forebay.telemetry.analysis.robust import correlation, log_deviations, median, variation
from forebay.telemetry.numbers import seconds_text, share_text

MIN_STEPS = 5
MIN_DEVIATION = 5.0
MIN_SHARE = 0.05
_HALF = 0.5

MAX_VARIATION = 0.10
MAX_CORRELATION = 0.5
_MIN_PERCENT = 1.0
"""Phases below this share are not mentioned."""
_MIN_TOKEN_VARIATION = 0.02
"""If all steps generate the same number of tokens, nothing can be said to depend on it."""
_NEVER = {"async_generate", "engine_async_generate", "engine", "prefill", "decode", "barrier_wait"}


def slow_steps(steps: Sequence[StepSummary], found: Sequence[Finding]) -> list[Finding]:
    """Set ``is_outlier`` on slow steps. Returns a finding for each step of which ``found`` explains less than half."""
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
            slow.append(_slow_step(step, usual_s, beyond_s))
    return slow


def outlier_steps(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Steps whose duration is more than ``MIN_DEVIATION`` deviations above the median, in logarithms."""
    if len(steps) < MIN_STEPS:
        return []
    seconds = [step.seconds for step in steps]
    usual_s = median(seconds)
    return [
        step
        for step, deviation in zip(steps, log_deviations(seconds), strict=True)
        if deviation > MIN_DEVIATION and step.seconds - usual_s > MIN_SHARE * step.seconds
    ]


def _slow_step(step: StepSummary, usual_s: float, beyond_s: float) -> Finding:
    parts = [("training", step.train_s), ("waiting for rollouts", step.wait_s), ("sending", step.send_s)]
    known = [f"{seconds_text(seconds)} {name}" for name, seconds in parts if seconds]
    text = f"it took {seconds_text(step.seconds)} instead of the usual {seconds_text(usual_s)}"
    text += f" ({', '.join(known)})" if known else ""
    return Finding(
        cause="slow_step",
        seconds=beyond_s,
        share=beyond_s / step.seconds,
        sentence=sentence(step.name, text, "slow_step"),
        path=EventPath(step=step.name),
    )


def constant_phases(steps: Sequence[StepSummary]) -> list[ConstantPhase]:
    """Phases that take the same time however much is generated, longest first. Steps without tokens are skipped."""
    known = [step for step in steps if step.tokens_per_s and step.phase_seconds and not step.is_open]
    if len(known) < MIN_STEPS:
        return []
    tokens = [(step.tokens_per_s or 0.0) * step.seconds for step in known]
    if variation(tokens) < _MIN_TOKEN_VARIATION:
        return []
    names = {name for step in known for name in step.phase_seconds} - _NEVER
    found = [phase for name in sorted(names) if (phase := _constant(name, known, tokens)) is not None]
    return sorted(found, key=lambda phase: -phase.mean_s)


def _constant(name: str, steps: Sequence[StepSummary], tokens: Sequence[float]) -> ConstantPhase | None:
    seconds = [step.phase_seconds.get(name, 0.0) / _parallel(step) for step in steps]
    share = fmean(step.phase_shares.get(name, 0.0) for step in steps)
    spread = variation(seconds)
    if share < _MIN_PERCENT or spread >= MAX_VARIATION or abs(correlation(seconds, tokens)) > MAX_CORRELATION:
        return None
    mean_s = fmean(seconds)
    return ConstantPhase(
        name=name,
        mean_s=mean_s,
        cv=spread,
        sentence=(
            f"{name} takes {mean_s:.2f} s in every step (± {100 * spread:.0f} %, {share:.1f} % of the time), "
            "however much is generated: it could be done once in advance."
        ),
    )


def _parallel(step: StepSummary) -> int:
    """The number of workers that run the phase at the same time: their seconds are a single wait."""
    return max(1, len(step.barrier_s) or len(step.requests_by_worker))


def of_constant_phases(phases: Sequence[ConstantPhase], steps: Sequence[StepSummary]) -> list[Finding]:
    """A finding for each of ``phases`` that takes at least a twentieth of the time."""
    found = []
    for phase in phases:
        share = fmean(step.phase_shares.get(phase.name, 0.0) for step in steps) / 100
        if share >= MIN_SHARE:
            text = (
                f"{phase.name} takes {seconds_text(phase.mean_s)} in each of {len(steps)} steps, {share_text(share)} "
                f"of their time, however much is generated. {ADVICE['constant_phase']}"
            )
            seconds, path = phase.mean_s * len(steps), EventPath(event=phase.name)
            found.append(Finding(cause="constant_phase", seconds=seconds, share=share, sentence=text, path=path))
    return found
