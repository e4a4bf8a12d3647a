"""Plots result rows: step time against waste, and against bias of the trained answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.telemetry.visible_text import visible
from forebay.workers.simulator.result_rows import Mean, ResultRow

SIZE_INCHES = (11.0, 4.6)
PANELS = (
    ("waste", "sampled and not trained on"),
    ("ks", "KS distance of trained lengths from offered ones"),
    ("tail_lost", "long answers to ordinary prompts that are lost"),
)


def draw(rows: Sequence[ResultRow], path: Path) -> None:
    """Write the plot as PNG or SVG, by the suffix of ``path``. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), sharex=True)
    for panel, (name, title) in zip(panels, PANELS, strict=True):
        for row in rows:
            _add(panel, row, name)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("seconds of a step")
        panel.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8)
    # Without a date, equal rows give equal files.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)


def _add(panel: Any, row: ResultRow, name: str) -> None:
    time, value = row.measures["step_mean_s"], _value(row, name)
    if time is None or value is None:
        return
    panel.errorbar(
        time.mean,
        value.mean,
        xerr=time.margin or None,
        yerr=value.margin or None,
        marker="o" if row.is_best else "x",
        linestyle="none",
        capsize=2,
        label=label_of(row),
    )


def _value(row: ResultRow, name: str) -> Mean | None:
    if name != "tail_lost":
        return row.measures[name]
    kept = row.measures["tail_kept"]
    return None if kept is None else Mean(1 - kept.mean, kept.margin)


def label_of(row: ResultRow) -> str:
    """Label of a row, in one line."""
    parts = [row.policy, row.label, f"{row.engines} engines", f"{row.num_process} at once"]
    # matplotlib reads a dollar sign as the start of a formula.
    return visible(", ".join(part for part in parts if part)).replace("$", r"\$")
