"""Renders a comparison of several runs, made by ``analysis/compare.py``."""

from collections.abc import Callable, Sequence

from forebay.telemetry.analysis.compare import compare
from forebay.telemetry.analysis.report import ComparedRun, ProfileReport, ReportComparison
from forebay.telemetry.numbers import counted, number_text, percent_text, seconds_text, share_text
from forebay.telemetry.render.blocks import Block, Cell, FigureBlock, PageSection, ParagraphBlock, TableBlock
from forebay.telemetry.render.panels import Panel, panel_figures

PICTURES = {
    "seconds": ("Duration of each step", "seconds", 1),
    "wait_s": ("Waiting for rollouts", "seconds", 1),
    "tokens_per_s": ("Throughput", "tokens per second", 1),
    "length_mean": ("Mean length of answers", "tokens", 1),
    "length_max": ("Longest answer", "tokens", 1),
    "share_at_cap": ("Answers at the cap", "%", 100),
    "reward_mean": ("Mean reward", "reward", 1),
}
"""By field of ``StepFigures``: title, unit, and factor for its values."""

ROWS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "seconds": ("mean seconds of a step", seconds_text),
    "interval_s": ("from step to step", seconds_text),
    "wait_s": ("waiting for rollouts", seconds_text),
    "tokens_per_s": ("tokens per second", number_text),
    "length_min": ("length: least", number_text),
    "length_mean": ("length: mean", number_text),
    "length_max": ("length: greatest", number_text),
    "share_at_cap": ("answers at the cap", share_text),
    "reward_mean": ("mean reward", number_text),
}
MOST_ROWS = 200


def compared(reports: Sequence[ProfileReport]) -> PageSection:
    """Compare the figures of the runs. Steps of the same name share a row."""
    found = compare(reports)
    blocks: list[Block] = [
        *(ParagraphBlock(sentence) for sentence in found.sentences),
        *_pictures(found),
        TableBlock(("", *(run.name for run in found.runs)), [*_overall(found.runs), _findings(reports)]),
        *_steps(found),
        TableBlock(("phase", *(run.name for run in found.runs)), _shares(reports)),
    ]
    return PageSection("compare", "Compared", blocks)


def _overall(runs: Sequence[ComparedRun]) -> list[list[Cell]]:
    rows: list[list[Cell]] = [["steps", *(number_text(run.num_steps) for run in runs)]]
    for field, (title, text) in ROWS.items():
        values = [getattr(run.figures, field) for run in runs]
        if any(value is not None for value in values):
            rows.append([title, *map(text, values)])
    rows.append(["reward of the first step", *(number_text(run.reward_first) for run in runs)])
    rows.append(["reward of the last step", *(number_text(run.reward_last) for run in runs)])
    rows.append(["saved per step", *(seconds_text(run.saved_s) for run in runs)])
    rows.append(["times as fast", *(number_text(run.speedup) for run in runs)])
    rows.append(["outlier steps", *(", ".join(run.outlier_steps) or "-" for run in runs)])
    return [row for row in rows if any(cell != "-" for cell in row[1:])]


def _findings(reports: Sequence[ProfileReport]) -> list[Cell]:
    return ["costliest finding", *(each.findings[0].sentence if each.findings else "-" for each in reports)]


def _pictures(found: ReportComparison) -> list[FigureBlock]:
    panels = []
    for field, (title, unit, factor) in PICTURES.items():
        lines: dict[str, list[float | None]] = {}
        for place, run in enumerate(found.runs):
            values = [None if (own := step.runs[place]) is None else getattr(own, field) for step in found.steps]
            lines[run.name] = [None if value is None else factor * value for value in values]
        panels.append(Panel(title, unit, lines))
    return panel_figures("compared", "Step by step", [step.name for step in found.steps], panels)


def _steps(found: ReportComparison) -> list[Block]:
    rows = [
        [step.name, *(seconds_text(figures.seconds if figures else None) for figures in step.runs)]
        for step in found.steps[:MOST_ROWS]
    ]
    blocks: list[Block] = [TableBlock(("seconds of step", *(run.name for run in found.runs)), rows)]
    if len(found.steps) > MOST_ROWS:
        text = f"The table has the first {MOST_ROWS} of {counted(len(found.steps), 'step')}."
        blocks.append(ParagraphBlock(text, is_note=True))
    return blocks


def _shares(reports: Sequence[ProfileReport]) -> list[list[Cell]]:
    phases = dict.fromkeys(phase for report in reports for phase in report.phase_shares)
    ordered = sorted(phases, key=lambda phase: -max(report.phase_shares.get(phase, 0.0) for report in reports))
    return [[phase, *(percent_text(report.phase_shares.get(phase)) for report in reports)] for phase in ordered]
