"""Compares several runs step by step: step times, throughput, lengths and rewards.

The first run is the baseline. Steps of the same name are compared.
"""

from collections.abc import Iterator, Sequence
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
    base = runs[0]
    for run in runs[1:]:
        run.saved_s = _difference(base.figures.seconds, run.figures.seconds)
        run.speedup = _ratio(base.figures.seconds, run.figures.seconds)
        run.throughput_gain = _ratio(run.figures.tokens_per_s, base.figures.tokens_per_s)
        run.reward_gain = _difference(run.reward_last, base.reward_last)
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
    begins = [step.begin_s for step in steps]
    interval_s = (begins[-1] - begins[0]) / (len(begins) - 1) if len(begins) > 1 else None
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    return ComparedRun(
        name=name,
        source=report.source,
        num_steps=len(steps),
        figures=StepFigures(**{figure: _mean(steps, figure) for figure in _FIGURES}, interval_s=interval_s),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        outlier_steps=[step.name for step in outlier_steps(steps)],
    )


def _mean(steps: Sequence[StepSummary], figure: str) -> float | None:
    known = [value for step in steps if (value := getattr(step, figure)) is not None]
    return fmean(known) if known else None


def _figures_of(step: StepSummary | None) -> StepFigures | None:
    return None if step is None else StepFigures(**{name: getattr(step, name) for name in _FIGURES})


def _difference(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def _ratio(left: float | None, right: float | None) -> float | None:
    return None if left is None or not right else left / right


def _changes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    for run in runs[1:]:
        if run.saved_s is not None:
            word = "less" if run.saved_s >= 0 else "more"
            text = f"{run.name}: {seconds_text(abs(run.saved_s))} {word} a step than {runs[0].name}"
            if run.throughput_gain is not None:
                text += f", {run.throughput_gain:.2f} times its tokens per second"
            if run.reward_gain is not None:
                text += f", its last reward {run.reward_gain:+.3f}"
            yield text + "."


def _peaks(names: Sequence[str], reports: Sequence[ProfileReport]) -> Iterator[str]:
    """Steps that were slow in one run only, so that the data cannot be the cause."""
    for name, report in zip(names, reports, strict=True):
        others = [step for other in reports if other is not report for step in other.steps]
        for step in outlier_steps(report.steps):
            same = sorted(each.seconds for each in others if each.name == step.name)
            if same and same[-1] < (1 - _ALIKE) * step.seconds:
                usual = seconds_text(same[0])
                if len(same) > 1:
                    usual += f" to {seconds_text(same[-1])}"
                yield (
                    f"Step {step.name} took {seconds_text(step.seconds)} in {name} and {usual} in the other "
                    f"{len(same)}: the data is not the cause."
                )
