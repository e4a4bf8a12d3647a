"""The result of each step: a line of JSON per step, a curve in the terminal, a picture at the end."""

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from forebay.client import Batch
from forebay.core.errors import MissingExtra

HEIGHT = 10
BARS = " ▁▂▃▄▅▆▇█"
TICKS = {HEIGHT - 1: "1.0 ┤", HEIGHT // 2 - 1: "0.5 ┤"}
"""Labels of the y axis, by row."""
WINDOW = 5
TITLE = "GRPO on sums: mean reward by step"
STEPS, REWARDS = "optimiser step", "mean reward of its samples (0 to 1)"
"""Labels of the axes."""

Entry = dict[str, Any]


class History:
    """The file ``history.jsonl``, with a line for each step whose model is visible."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def cut(self, step: int) -> None:
        """Remove the lines after ``step``: those steps were not finished and are repeated."""
        self.entries = [entry for entry in self.entries if entry["step"] <= step]
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))
        draft.replace(self.path)

    def add(self, entry: Entry) -> None:
        """Add a line, and sync it to disk."""
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """Step and mean reward of the steps that have a reward."""
        return [(entry["step"], entry["reward"]) for entry in self.entries if entry["reward"] is not None]

    @property
    def gain(self) -> float | None:
        """Mean reward of the last five steps minus that of the first five; None with fewer than ten."""
        rewards = [reward for _, reward in self.rewards]
        if len(rewards) < 2 * WINDOW:
            return None
        return (sum(rewards[-WINDOW:]) - sum(rewards[:WINDOW])) / WINDOW


def make_entry(step: int, batch: Batch, seconds: float) -> Entry:
    """The line of a step.

    ``reward`` is the mean over all samples that arrived since the previous batch, including groups that were discarded
    because their rewards were all equal. It is None if none arrived, as may happen after a restart. ``batch_reward`` is
    the mean over the samples trained on.
    """
    info, raw = batch.meta_info, [row["raw_reward"] for row in batch.rows]
    return {
        "step": step,
        "reward": info["avg_reward"] if info["total_samples"] else None,
        "num_samples": info["total_samples"],
        "batch_reward": sum(raw) / len(raw),
        "weight_versions": sorted({version for row in batch.rows for version in versions_of(row)}),
        "groups": [[group.instance_id, group.samples[0]["epoch"]] for group in batch.groups],
        "seconds": round(seconds, 2),
    }


def versions_of(row: dict[str, Any]) -> list[int]:
    """The weight versions of a sample."""
    return [row["weight_version"]] if "weight_version" in row else list(row.get("weight_versions", []))


def draw(history: History, doing: str) -> RenderableType:
    """The curve so far with its axes, one column per step, and the text ``doing``."""
    rewards = [reward for _, reward in history.rewards]
    lines = [
        Text.assemble(TICKS.get(row, "    ┤"), ("".join(_bar(reward, row) for reward in rewards), "green"))
        for row in reversed(range(HEIGHT))
    ]
    latest = f"{describe(history.entries[-1])}\n" if history.entries else ""
    width = max(60, len(rewards) + 9)
    return Panel(
        Group(Text(f"{REWARDS}"), *lines, *_step_axis(history), Text(f"{latest}{doing}")), title=TITLE, width=width
    )


def _step_axis(history: History) -> list[Text]:
    """The line below the curve, and the first and last step."""
    steps = [step for step, _ in history.rewards]
    ends = f"{steps[0]} … {steps[-1]}" if steps else "none yet"
    return [Text(f"0.0 └{'─' * len(steps)}"), Text(f"     {STEPS}: {ends}\n")]


def describe(entry: Entry) -> str:
    """A step as one line of text."""
    reward = "-" if entry["reward"] is None else f"{entry['reward']:.3f}"
    weights = ", ".join(map(str, entry["weight_versions"]))
    return (
        f"step {entry['step']}: mean reward {reward} of {entry['num_samples']} samples, "
        f"trained on {len(entry['groups'])} groups of weights {weights}, {entry['seconds']:.1f} s"
    )


def _bar(reward: float, row: int) -> str:
    filled = round((reward * HEIGHT - row) * (len(BARS) - 1))
    return BARS[min(max(filled, 0), len(BARS) - 1)]


def save_picture(history: History, path: Path) -> None:
    """Write the curve in the format of the suffix of ``path``. Raises ``MissingExtra`` without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise MissingExtra("matplotlib", "rl") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*history.rewards, strict=True), marker="o", markersize=3)
    axes.set(title=TITLE, xlabel=STEPS, ylabel=REWARDS, ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    with rc_context({"svg.fonttype": "none"}):  # keeps text in an SVG searchable
        figure.savefig(path, dpi=150)
