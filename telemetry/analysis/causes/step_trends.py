"""Compares the steps of a run: what grew in a slow step, what grows all the time, and what never changes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from forebay.telemetry.analysis.causes.kinds import ENGINE, MIN_S, MIN_SHARE
from forebay.telemetry.analysis.causes.request_excess import MIN_DEVIATION
from forebay.telemetry.analysis.causes.wording import of_run, of_step
from forebay.telemetry.analysis.report import EventPath, Finding, StepSummary
from forebay.telemetry.analysis.robust import correlation, deviation_of, log_deviations, median, median_slope, variation
from forebay.telemetry.numbers import seconds_text

MIN_STEPS = 5
_HALF = 0.5
_SPREAD, _MAX_SPREAD = 0.1, 0.5
_STEP_SPREAD = 0.05
_MIN_STEPS_OF_TREND = 6
_MIN_GROWTH = 0.25
_SURELY = 5.0
"""A trend must exceed the scatter around it by this factor."""
MAX_VARIATION = 0.10
MAX_CORRELATION = 0.5
_CLEARLY_LESS = 0.3
"""A phase that varies by this share of what the tokens do does not depend on them: few steps correlate by chance."""
_MIN_TOKEN_VARIATION = 0.02
"""If all steps generate the same number of tokens, nothing can be said to depend on it."""


def over_steps(steps: Sequence[StepSummary], found: Sequence[Finding], unsure: Sequence[Finding]) -> list[Finding]:
    """Findings that need all steps. Sets ``is_outlier`` on slow steps. ``found`` are the findings of single steps.

    ``unsure``: findings that count only if their step was slow, and nothing else explains it.
    """
    ended = [step for step in steps if not step.is_open]
    trends = list(_trends(ended))
    trending = {finding.path.event for finding in trends}
    grown = [each for each in _grown_phases(ended) if each.path.event not in trending]
    known = {(finding.path.step, finding.path.event) for finding in found}
    grown = [each for each in grown if (each.path.step, each.path.event) not in known]
    return [*trends, *grown, *_slow_steps(ended, [*found, *grown, *trends], unsure)]


def outlier_steps(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Steps whose duration is more than ``MIN_DEVIATION`` deviations above the median, in logarithms."""
    if len(steps) < MIN_STEPS:
        return []
    seconds = [step.seconds for step in steps]
    usual_s = median(seconds)
    return [
        step
        for step, deviation in zip(steps, log_deviations(seconds, _STEP_SPREAD), strict=True)
        if deviation > MIN_DEVIATION and step.seconds - usual_s > MIN_SHARE * step.seconds
    ]


def _grown_phases(steps: Sequence[StepSummary]) -> Iterator[Finding]:
    """Phases outside requests that took far longer in one step than in the others."""
    if len(steps) < MIN_STEPS:
        return
    for phase in dict.fromkeys(name for step in steps for name in step.outside_s):
        seconds = [step.outside_s.get(phase, 0.0) for step in steps]
        usual_s = median(seconds)
        for step, own_s in zip(steps, seconds, strict=True):
            beyond_s = own_s - usual_s
            if beyond_s < max(MIN_S, MIN_SHARE * step.seconds):
                continue
            if deviation_of(own_s, seconds, _SPREAD, _MAX_SPREAD) > MIN_DEVIATION:
                text = f"{phase} took {seconds_text(own_s)} instead of the usual {seconds_text(usual_s)}"
                yield of_step(step, "slow_step", beyond_s, text, EventPath(event=phase))


def _slow_steps(steps: Sequence[StepSummary], found: Sequence[Finding], unsure: Sequence[Finding]) -> Iterator[Finding]:
    """Slow steps of which ``found`` explains less than half, each with the phase that grew."""
    usual_s = median([step.seconds for step in steps])
    explained: dict[str, float] = defaultdict(float)
    usual_causes = Counter(finding.cause for finding in found)
    for finding in found:
        if usual_causes[finding.cause] < _HALF * len(steps):  # what every step loses does not explain a slow one
            explained[finding.path.step] += finding.seconds
    spent = {step.name: _spent_s(step) for step in steps}
    names = {name for own in spent.values() for name in own}
    usual = {name: median([each.get(name, 0.0) for each in spent.values()]) for name in names}
    for step in outlier_steps(steps):
        step.is_outlier = True
        beyond_s = step.seconds - usual_s
        if explained[step.name] >= _HALF * beyond_s:
            continue
        likely = [each for each in unsure if each.path.step == step.name and each.seconds >= _HALF * beyond_s]
        if likely:
            yield from likely
            continue
        grew = {name: seconds - usual[name] for name, seconds in spent[step.name].items()}
        phase = max(grew, key=lambda name: grew[name], default="")
        text = f"it took {seconds_text(step.seconds)} instead of the usual {seconds_text(usual_s)}"
        if phase and grew[phase] > 0:
            own_s = seconds_text(spent[step.name][phase])
            text += f"; most of it is {phase}: {own_s} instead of {seconds_text(usual[phase])}"
        yield of_step(step, "slow_step", beyond_s, text, EventPath(event=phase))


def _spent_s(step: StepSummary) -> dict[str, float]:
    """What a step spent its time on, one after another: phases outside requests, and its critical path."""
    spent = defaultdict(float, step.outside_s)
    for part in step.critical_path:
        spent["engine" if part.path.event in ENGINE else part.path.event] += part.seconds
    return spent


def _trends(steps: Sequence[StepSummary]) -> Iterator[Finding]:
    """Phases outside requests, and seconds per token, that grow from step to step."""
    if len(steps) < _MIN_STEPS_OF_TREND:
        return
    for phase in dict.fromkeys(name for step in steps for name in step.outside_s):
        line = _growing([step.outside_s.get(phase, 0.0) for step in steps])
        if line:
            values = f"from {seconds_text(line[0])} to {seconds_text(line[-1])}"
            yield from _slowing(steps, phase, values, [max(0.0, each - line[0]) for each in line])
    rates = [step.s_per_token or 0.0 for step in steps]
    line = _growing(rates)
    lengths = [step.length_mean or 0.0 for step in steps]
    # Longer answers take more memory of an engine, so each token takes longer.
    if line and all(rates) and not _growing(lengths):
        engine_s = [_spent_s(step)["engine"] for step in steps]
        beyond = [own_s * max(0.0, 1 - line[0] / each) for own_s, each in zip(engine_s, line, strict=True)]
        values = f"from {1e3 * line[0]:.3g} to {1e3 * line[-1]:.3g} ms per token"
        yield from _slowing(steps, "engine", values, beyond)


def _growing(values: Sequence[float]) -> list[float] | None:
    """The line through ``values`` (Theil and Sen), if it surely grows."""
    slope = median_slope(values)
    base = median([value - slope * place for place, value in enumerate(values)])
    line = [base + slope * place for place in range(len(values))]
    scatter = median([abs(value - each) for value, each in zip(values, line, strict=True)])
    growth = line[-1] - line[0]
    is_sure = growth > _SURELY * scatter and base > 0 and growth > _MIN_GROWTH * base
    return line if is_sure else None


def _slowing(steps: Sequence[StepSummary], phase: str, values: str, beyond: Sequence[float]) -> Iterator[Finding]:
    seconds = sum(beyond)
    text = f"In {len(steps)} steps, {phase} grew {values}, which cost {seconds_text(seconds)}"
    finding = of_run(steps, "slowing", seconds, text, phase)
    if finding.share >= MIN_SHARE and seconds >= MIN_S:
        yield finding


def constant_phases(steps: Sequence[StepSummary]) -> Iterator[Finding]:
    """Phases of workers that take the same time however much is generated."""
    known = [step for step in steps if step.tokens_per_s and step.worker_s and not step.is_open]
    tokens = [(step.tokens_per_s or 0.0) * step.seconds for step in known]
    if len(known) < MIN_STEPS or variation(tokens) < _MIN_TOKEN_VARIATION:
        return
    for name in dict.fromkeys(name for step in known for name in step.worker_s):
        seconds = [step.worker_s.get(name, 0.0) for step in known]
        spread, mean_s = variation(seconds), fmean(seconds)
        depends = abs(correlation(seconds, tokens)) > MAX_CORRELATION and spread > _CLEARLY_LESS * variation(tokens)
        text = f"{name} takes {seconds_text(mean_s)} in each of {len(known)} steps (± {100 * spread:.0f} %), "
        finding = of_run(steps, "constant_phase", sum(seconds), text + "however much is generated", name)
        if spread < MAX_VARIATION and not depends and finding.share >= MIN_SHARE:
            yield finding
