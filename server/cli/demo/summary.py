"""What the demo shows at its end."""

from pathlib import Path
from typing import Any

from rich.console import Console

from forebay.server.cli.demo.trainer import SlimeTrainer
from forebay.server.cli.options import own_command
from forebay.server.cli.output import facts_table, show_table
from forebay.server.cli.progress import RunProgress
from forebay.server.cli.run_facts import DISCARD_REASONS


def show_summary(
    console: Console, progress: RunProgress, trainer: SlimeTrainer, elapsed_s: float, folder: Path
) -> None:
    """A table of what happened, one delivered row, and where to go from here."""
    console.print("What happened", style="bold")
    show_table(console, facts_table(summary_facts(progress, trainer, elapsed_s)))
    if trainer.best_row is not None:
        console.print(f"A row as the trainer got it: {_row_text(trainer.best_row)}\n", markup=False, soft_wrap=True)
    console.print(
        f"Everything is kept in {folder}. Look at it again, and go on:\n"
        f"  {own_command()} serve --data-dir {folder / 'data'}\n"
        f"  {own_command()} status                    (in another terminal)\n"
        f"  {own_command()} generators new my_task    (a generator of your own)",
        markup=False,
        soft_wrap=True,
    )


def summary_facts(progress: RunProgress, trainer: SlimeTrainer, elapsed_s: float) -> dict[str, str]:
    """Names and values of the summary."""
    groups, view = progress.groups, progress.view
    return {
        "tasks": f"{view['num_groups_total']}, {view['settings']['group_size']} samples each",
        "samples in": f"{progress.num_samples}, {view['samples'].get('failed', 0)} of them failed",
        "mean reward": "-" if progress.mean_reward is None else f"{progress.mean_reward:.3f}",
        "groups delivered": f"{groups['delivered']}, as {trainer.num_rows} rows in {trainer.num_batches} batches",
        "groups discarded": str(groups["discarded"]),
        **{f"  {reason}": f"{number}: {DISCARD_REASONS[reason]}" for reason, number in view["discarded"].items()},
        "groups left": str(groups["open"] + groups["full"] + groups["ready"]),
        "time": f"{elapsed_s:.1f} s, {progress.num_samples / elapsed_s:.0f} samples/s",
    }


def _row_text(row: dict[str, Any]) -> str:
    question = str(row["messages"][0]["content"]).splitlines()[0]
    answer = str(row["messages"][-1]["content"])
    raw = row.get("raw_reward", row["reward"])
    return f"{question!r} → {answer!r}, reward {raw:g}, normalised within its group {row['reward']:+.2f}"
