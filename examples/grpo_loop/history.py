"""What each step brought: a line of JSON per step, a curve in the terminal, a picture at the end."""

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
"""By the row that ends at it."""
WINDOW = 5
TITLE = "GRPO on sums: mean reward by step"
STEPS, REWARDS = "optimiser step", "mean reward of its samples (0 to 1)"
"""What the axes count."""

Entry = dict[str, Any]


class History:
    """The file ``history.jsonl``. Its lines are those of the steps whose models are visible."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def cut(self, step: int) -> None:
        """Forget the lines after ``step``: their step was not finished, and comes again."""
        self.entries = [entry for entry in self.entries if entry["step"] <= step]
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))
        draft.replace(self.path)

    def add(self, entry: Entry) -> None:
        """Add a line, on disk when this returns."""
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """Step and mean reward, where there is one."""
        return [(entry["step"], entry["reward"]) for entry in self.entries if entry["reward"] is not None]

    @property
    def gain(self) -> float | None:
        """Mean reward of the last five steps less that of the first five."""
        rewards = [reward for _, reward in self.rewards]
        if len(rewards) < 2 * WINDOW:
            return None
        return (sum(rewards[-WINDOW:]) - sum(rewards[:WINDOW])) / WINDOW


def make_entry(step: int, batch: Batch, seconds: float) -> Entry:
    """The line of a step.

    ``reward`` is the mean over all samples that arrived since the batch before, also those of groups that were
    discarded because their rewards were all equal; ``batch_reward`` that of the samples trained on, without such
    groups. After a restart nothing may have arrived since: then there is no ``reward``.
    """
    told, raw = batch.meta_info, [row["raw_reward"] for row in batch.rows]
    return {
        "step": step,
        "reward": told["avg_reward"] if told["total_samples"] else None,
        "num_samples": told["total_samples"],
        "batch_reward": sum(raw) / len(raw),
        "weight_versions": sorted({version for row in batch.rows for version in versions_of(row)}),
        "groups": [[group.instance_id, group.samples[0]["epoch"]] for group in batch.groups],
        "seconds": round(seconds, 2),
    }


def versions_of(row: dict[str, Any]) -> list[int]:
    """The weight versions that a sample names."""
    return [row["weight_version"]] if "weight_version" in row else list(row.get("weight_versions", []))


def draw(history: History, doing: str) -> RenderableType:
    """The curve so far, as wide as there are steps, between its axes, and what is being done."""
    rewards = [reward for _, reward in history.rewards]
    lines = [
        Text.assemble(TICKS.get(row, "    ┤"), ("".join(_bar(reward, row) for reward in rewards), "green"))
        for row in reversed(range(HEIGHT))
    ]
    told = f"{describe(history.entries[-1])}\n" if history.entries else ""
    width = max(60, len(rewards) + 9)
    return Panel(
        Group(Text(f"{REWARDS}"), *lines, *_step_axis(history), Text(f"{told}{doing}")), title=TITLE, width=width
    )


def _step_axis(history: History) -> list[Text]:
    """The line below the curve, and which steps stand above its ends."""
    steps = [step for step, _ in history.rewards]
    ends = f"{steps[0]} … {steps[-1]}" if steps else "none yet"
    return [Text(f"0.0 └{'─' * len(steps)}"), Text(f"     {STEPS}: {ends}\n")]


def describe(entry: Entry) -> str:
    """A step in a line."""
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
    """Write the curve as PNG, or as what else ``path`` ends in. Raises ``MissingExtra`` without matplotlib."""
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
    with rc_context({"svg.fonttype": "none"}):  # words as words, for those who search
        figure.savefig(path, dpi=150)
