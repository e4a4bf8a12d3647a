"""What the displays show of a run."""

import io
from typing import Any

from rich.console import Console

from forebay.server.cli.demo.trainer import RewardMean
from forebay.server.cli.progress import LineDisplay, LiveDisplay, RateMeter, RunProgress, make_display

VIEW: dict[str, Any] = {
    "run_id": "run-1",
    "task_type": "math",
    "state": "running",
    "has_ended": False,
    "is_waiting_for_engine": False,
    "is_held": False,
    "is_paused": False,
    "is_stalled": False,
    "num_groups_total": 10,
    "groups": {"open": 3, "ready": 1, "leased": 1, "acked": 3, "discarded": 2},
    "num_groups_full": 2,
    "discarded": {"invalid": 2},
    "samples": {"member": 60, "failed": 4, "duplicate": 9},
}


def test_a_line_has_every_number() -> None:
    line = RunProgress(VIEW, 12.4, 0.5).as_line(3.0)
    assert "9 of 10 done: open 1 · full 2 · ready 2 · delivered 3 · discarded 2 (invalid 2)" in line
    assert "64 in · 4 failed · 12/s" in line
    assert "mean 0.500" in line


def test_the_rate_is_that_of_the_last_seconds() -> None:
    now = [0.0]
    meter = RateMeter(lambda: now[0])
    assert meter.update(0) == 0.0
    for second in range(1, 11):
        now[0] = float(second)
        rate = meter.update(100 if second > 5 else 0)
    assert rate == 20.0
    now[0] = 20.0
    assert meter.update(100) == 0.0


def test_lines_come_at_intervals_and_the_last_one_always() -> None:
    out = io.StringIO()
    with LineDisplay(Console(file=out, width=200), interval_s=1000.0) as display:
        for state in ("first", "second", "third"):
            display.show(RunProgress({**VIEW, "state": state}, 0.0))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "first" in lines[0]
    assert "third" in lines[1]


def test_a_terminal_gets_a_live_panel() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    display = make_display(console)
    assert isinstance(display, LiveDisplay)
    console.print(RunProgress(VIEW, 1.0, 0.25).as_panel(2.0))
    assert "9 of 10 groups" in out.getvalue()
    assert isinstance(make_display(Console(file=io.StringIO())), LineDisplay)


def test_the_mean_reward_counts_each_sample_once() -> None:
    mean = RewardMean()
    assert mean.value is None
    mean.add({"total_samples": 2, "avg_reward": 0.5}, is_consumed=False)
    mean.add({"total_samples": 4, "avg_reward": 0.5}, is_consumed=True)
    mean.add({"total_samples": 4, "avg_reward": 1.0}, is_consumed=False)
    assert mean.value == 0.75
