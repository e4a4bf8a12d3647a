"""Phases whose seconds do not depend on how much was generated: they could be done once, beforehand."""

from collections.abc import Sequence
from statistics import fmean

from forebay.telemetry.analysis.report import ConstantPhase, StepSummary
from forebay.telemetry.analysis.robust import correlation, variation

MAX_VARIATION = 0.10
MAX_CORRELATION = 0.5
MIN_STEPS = 5
_MIN_SHARE = 1.0
"""In percent: a phase below it is not worth a sentence."""
_MIN_TOKEN_VARIATION = 0.02
"""Where answers are always as long, nothing can be said to depend on their length."""
_NEVER = {"async_generate", "engine_async_generate", "engine", "prefill", "decode", "barrier_wait"}


def over_steps(steps: Sequence[StepSummary]) -> list[ConstantPhase]:
    """The longest first. Steps without tokens say nothing."""
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
    if share < _MIN_SHARE or spread >= MAX_VARIATION or abs(correlation(seconds, tokens)) > MAX_CORRELATION:
        return None
    mean_s = fmean(seconds)
    return ConstantPhase(
        name=name,
        mean_s=mean_s,
        cv=spread,
        sentence=(
            f"{name} takes {mean_s:.2f} s in every step (± {100 * spread:.0f} %, {share:.1f} % of the time), "
            "however much is generated: it could be done once, beforehand."
        ),
    )


def _parallel(step: StepSummary) -> int:
    """How many workers do the same at once: their seconds are one wait."""
    return max(1, len(step.barrier_s) or len(step.requests_by_worker))
