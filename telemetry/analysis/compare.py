"""Compares several runs step by step: step times, throughput, lengths and rewards.

The first run is the baseline. Steps of the same name are compared.
"""

from collections.abc import Sequence
from pathlib import PurePath
from statistics import fmean

from forebay.telemetry.analysis.causes.step_trends import outlier_steps
from forebay.telemetry.analysis.report import (
    ComparedRun,
    ComparedStep,
    ProfileReport,
    ReportComparison,
    StepFigures,
    StepSummary,
)
from forebay.telemetry.numbers import seconds_text

_ALIKE = 0.05
"""A step is a peak of one run only if the same step of every other run is faster by more than this share."""

_FIGURES = tuple(name for name in StepFigures.__struct_fields__ if name != "interval_s")
"""The compared figures; the fields of a step's summary have the same names."""


def compare(reports: Sequence[ProfileReport]) -> ReportComparison:
    """Compare the reports; the first is the baseline."""
    names = _run_names([report.source for report in reports])
    runs = [_run(name, report) for name, report in zip(names, reports, strict=True)]
    for run in runs[1:]:
        _relate(run, runs[0])
    by_name = [{step.name: step for step in report.steps} for report in reports]
    ordered = dict.fromkeys(step.name for report in reports for step in report.steps)
    steps = [ComparedStep(name=name, runs=[_figures_of(steps.get(name)) for steps in by_name]) for name in ordered]
    return ReportComparison(runs=runs, steps=steps, sentences=[*_changes(runs), *_peaks(names, reports)])


def _run_names(sources: Sequence[str]) -> list[str]:
    """The last parts of the paths, numbered if they are ambiguous."""
    last = [PurePath(source).name or source for source in sources]
    return [name if last.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(last, 1)]


def _run(name: str, report: ProfileReport) -> ComparedRun:
    steps = report.steps
    return ComparedRun(
        name=name,
        source=report.source,
        num_steps=len(steps),
        figures=_means(steps),
        reward_first=next((step.reward_mean for step in steps if step.reward_mean is not None), None),
        reward_last=next((step.reward_mean for step in reversed(steps) if step.reward_mean is not None), None),
        outlier_steps=[step.name for step in outlier_steps(steps)],
    )


def _means(steps: Sequence[StepSummary]) -> StepFigures:
    means = {name: _mean([getattr(step, name) for step in steps]) for name in _FIGURES}
    return StepFigures(**means, interval_s=_interval(steps))


def _figures_of(step: StepSummary | None) -> StepFigures | None:
    return None if step is None else StepFigures(**{name: getattr(step, name) for name in _FIGURES})


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _interval(steps: Sequence[StepSummary]) -> float | None:
    """Mean time from the begin of a step to that of the next, including the time between steps."""
    begins = [step.begin_s for step in steps]
    return (begins[-1] - begins[0]) / (len(begins) - 1) if len(begins) > 1 else None


def _relate(run: ComparedRun, base: ComparedRun) -> None:
    run.saved_s = _difference(base.figures.seconds, run.figures.seconds)
    run.speedup = _ratio(base.figures.seconds, run.figures.seconds)
    run.throughput_gain = _ratio(run.figures.tokens_per_s, base.figures.tokens_per_s)
    run.reward_gain = _difference(run.reward_last, base.reward_last)


def _difference(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def _ratio(left: float | None, right: float | None) -> float | None:
    return None if left is None or not right else left / right


def _changes(runs: Sequence[ComparedRun]) -> list[str]:
    base = runs[0] if runs else None
    found = []
    for run in runs[1:]:
        if base is None or run.saved_s is None or run.figures.seconds is None:
            continue
        word = "less" if run.saved_s >= 0 else "more"
        text = f"{run.name}: {seconds_text(abs(run.saved_s))} {word} a step than {base.name}"
        if run.throughput_gain is not None:
            text += f", {run.throughput_gain:.2f} times its tokens per second"
        if run.reward_gain is not None:
            text += f", its last reward {run.reward_gain:+.3f}"
        found.append(text + ".")
    return found


def _peaks(names: Sequence[str], reports: Sequence[ProfileReport]) -> list[str]:
    """Steps that were slow in one run only, so that the data cannot be the cause."""
    found = []
    for name, report in zip(names, reports, strict=True):
        others = [other for other in reports if other is not report]
        for step in outlier_steps(report.steps):
            same = [each for other in others for each in other.steps if each.name == step.name]
            if same and all(each.seconds < (1 - _ALIKE) * step.seconds for each in same):
                fast, slow = min(each.seconds for each in same), max(each.seconds for each in same)
                usual = seconds_text(fast) if len(same) == 1 else f"{seconds_text(fast)} to {seconds_text(slow)}"
                found.append(
                    f"Step {step.name} took {seconds_text(step.seconds)} in {name} and {usual} in the other "
                    f"{len(same)}: the data is not the cause."
                )
    return found
