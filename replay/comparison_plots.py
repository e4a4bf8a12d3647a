"""A comparison as a picture: verdicts, rewards and advantages, as recorded and as changed."""

from pathlib import Path
from typing import TYPE_CHECKING

from forebay.replay.comparison import Comparison, Move

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (13.0, 4.2)
NUM_BINS = 40
NAMES = ("as recorded", "as changed")
COLOURS = ("tab:blue", "tab:orange")


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture, as PNG or SVG by the ending of ``path``. Needs no display. Raises ``OSError``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    verdicts, rewards, advantages = figure.subplots(1, 3)
    _bars(verdicts, comparison)
    _histogram(rewards, "reward", comparison.rewards)
    _histogram(advantages, "advantage", comparison.advantages)
    figure.legend(*verdicts.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    # Without a date, equal comparisons give equal files.
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _bars(panel: "Axes", comparison: Comparison) -> None:
    counts = [comparison.verdicts_before, *([comparison.verdicts_after] if comparison.is_changed else [])]
    verdicts = sorted({verdict for each in counts for verdict in each})
    height = 0.8 / len(counts)
    for number, each in enumerate(counts):
        places = [place + number * height for place in range(len(verdicts))]
        values = [each[verdict] for verdict in verdicts]
        panel.barh(places, values, height, label=NAMES[number], color=COLOURS[number])
    panel.set_yticks(
        [place + height * (len(counts) - 1) / 2 for place in range(len(verdicts))],
        verdicts,
        fontsize=8,
        parse_math=False,
    )
    panel.invert_yaxis()
    panel.set_title("groups by verdict", fontsize=9)
    panel.grid(alpha=0.3, axis="x")


def _histogram(panel: "Axes", name: str, move: Move) -> None:
    panel.set_title(f"samples by {name}", fontsize=9)
    panel.grid(alpha=0.3)
    shown = [each for each in (move.before, move.after) if each]
    if not shown:
        return
    low, high = min(map(min, shown)), max(map(max, shown))
    limits = (low, high) if low < high else (low - 0.5, high + 0.5)
    for number, each in enumerate((move.before, move.after)):
        panel.hist(each, bins=NUM_BINS, range=limits, histtype="step", linewidth=1.5, color=COLOURS[number])
    panel.set_xlabel(name)
    panel.set_ylabel("samples")
