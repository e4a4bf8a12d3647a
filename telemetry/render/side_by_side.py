"""Renders a comparison of several runs, made by ``analysis/compare.py``."""

from collections.abc import Sequence

from forebay.telemetry.analysis.compare import compare
from forebay.telemetry.analysis.report import ComparedRun, ProfileReport, ReportComparison
from forebay.telemetry.numbers import counted, number_text, percent_text, seconds_text, share_text
from forebay.telemetry.render.blocks import Block, Cell, FigureBlock, ParagraphBlock, TableBlock
from forebay.telemetry.render.charts import Panel, panel_figures

FIGURES = {
    "seconds": ("Duration of a step", "seconds"),
    "interval_s": ("From step to step", "seconds"),
    "wait_s": ("Waiting for rollouts", "seconds"),
    "tokens_per_s": ("Throughput", "tokens per second"),
    "length_min": ("Shortest answer", "tokens"),
    "length_mean": ("Mean length of answers", "tokens"),
    "length_max": ("Longest answer", "tokens"),
    "share_at_cap": ("Answers at the cap", "%"),
    "reward_mean": ("Mean reward", "reward"),
}
"""By field of ``StepFigures``: title and unit."""
TEXTS = {"seconds": seconds_text, "%": share_text}
MOST_ROWS = 200


def compared(reports: Sequence[ProfileReport]) -> list[Block]:
    """Compare the figures of the runs. Steps of the same name share a row."""
    found = compare(reports)
    names = [run.name for run in found.runs]
    costliest = [each.findings[0].sentence if each.findings else "-" for each in reports]
    shown = [
        [step.name, *(seconds_text(figures.seconds if figures else None) for figures in step.runs)]
        for step in found.steps[:MOST_ROWS]
    ]
    blocks: list[Block] = [
        *(ParagraphBlock(sentence) for sentence in found.sentences),
        *_pictures(found),
        TableBlock(("", *names), [*_overall(found.runs), ["costliest finding", *costliest]]),
        TableBlock(("seconds of step", *names), shown),
    ]
    if len(found.steps) > MOST_ROWS:
        text = f"The table has the first {MOST_ROWS} of {counted(len(found.steps), 'step')}."
        blocks.append(ParagraphBlock(text, is_note=True))
    blocks.append(TableBlock(("phase", *names), _shares(reports)))
    return blocks


def _overall(runs: Sequence[ComparedRun]) -> list[list[Cell]]:
    rows: list[list[Cell]] = [["steps", *(number_text(run.num_steps) for run in runs)]]
    for field, (title, unit) in FIGURES.items():
        text = TEXTS.get(unit, number_text)
        rows.append([f"{title}, mean", *(text(getattr(run.figures, field)) for run in runs)])
    rows.append(["reward of the first step", *(number_text(run.reward_first) for run in runs)])
    rows.append(["reward of the last step", *(number_text(run.reward_last) for run in runs)])
    rows.append(["saved per step", *(seconds_text(run.saved_s) for run in runs)])
    rows.append(["times as fast", *(number_text(run.speedup) for run in runs)])
    rows.append(["outlier steps", *(", ".join(run.outlier_steps) or "-" for run in runs)])
    return [row for row in rows if any(cell != "-" for cell in row[1:])]


def _pictures(found: ReportComparison) -> list[FigureBlock]:
    panels = []
    for field, (title, unit) in FIGURES.items():
        lines: dict[str, list[float | None]] = {}
        for place, run in enumerate(found.runs):
            lines[run.name] = [getattr(step.runs[place], field, None) for step in found.steps]
        panels.append(Panel(title, unit, lines))
    return panel_figures("compared", "Step by step", [step.name for step in found.steps], panels)


def _shares(reports: Sequence[ProfileReport]) -> list[list[Cell]]:
    phases = dict.fromkeys(phase for report in reports for phase in report.phase_shares)
    ordered = sorted(phases, key=lambda phase: -max(report.phase_shares.get(phase, 0.0) for report in reports))
    return [[phase, *(percent_text(report.phase_shares.get(phase)) for report in reports)] for phase in ordered]
