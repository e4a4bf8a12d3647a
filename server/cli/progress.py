"""Live numbers of a run, in a terminal panel, or as lines without a terminal."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.server.cli.output import counts_text, facts_table
from forebay.server.cli.run_facts import replayed_text, state_text
from forebay.server.findings import groups_of, samples_of

RATE_WINDOW_S = 5.0
LINE_INTERVAL_S = 5.0
BAR_WIDTH = 40


@dataclass
class RateMeter:
    """Samples per second over the last ``RATE_WINDOW_S`` seconds."""

    clock: Callable[[], float] = time.monotonic
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def update(self, count: int) -> float:
        """Record the total so far, and return the rate."""
        now_s = self.clock()
        self._seen.append((now_s, count))
        # One entry older than the window is kept: without it there would be no rate after a long pause.
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - RATE_WINDOW_S:
            self._seen.popleft()
        first_s, first = self._seen[0]
        return (count - first) / (now_s - first_s) if now_s > first_s else 0.0


@dataclass(frozen=True)
class RunProgress:
    """A snapshot of a run: the server's view of it, samples per second, and the mean reward if known."""

    view: dict[str, Any]
    samples_per_s: float
    mean_reward: float | None = None

    @property
    def num_samples(self) -> int:
        """Samples received, without duplicates."""
        return sum(number for name, number in samples_of(self.view).items() if name != "duplicate")

    @property
    def num_done(self) -> int:
        """Groups that take no more samples: full, ready, with a trainer, delivered or discarded."""
        return sum(number for state, number in self.groups.items() if state != "open")

    @property
    def groups(self) -> dict[str, int]:
        """Groups by state, as displayed."""
        groups = groups_of(self.view)
        num_leased = groups.pop("leased")
        return {**groups, "ready": groups["ready"] + num_leased}

    def groups_text(self) -> str:
        """Groups by state, as text; discarded ones also by reason."""
        why = f" ({counts_text(self.view['discarded'])})" if self.groups["discarded"] else ""
        return " · ".join(f"{name} {number}" for name, number in self.groups.items()) + why

    def samples_text(self) -> str:
        """Number and rate of received samples, as text."""
        failed = self.view["samples"].get("failed", 0)
        replayed = replayed_text(self.view)
        return f"{self.num_samples} in · {failed} failed · {self.samples_per_s:.0f}/s{replayed and f' · {replayed}'}"

    def reward_text(self) -> str:
        """The mean reward as text; "" if unknown."""
        return "" if self.mean_reward is None else f"mean {self.mean_reward:.3f}"

    def as_line(self, elapsed_s: float) -> str:
        """All progress on one line."""
        total = self.view["num_groups_total"]
        done = f"{self.num_done} of {total} done: " if total is not None else ""
        parts = [f"groups {done}{self.groups_text()}", f"samples {self.samples_text()}"]
        if self.mean_reward is not None:
            parts.append(f"reward {self.reward_text()}")
        return f"[{elapsed_s:5.1f} s] {state_text(self.view)}: " + " | ".join(parts)

    def as_panel(self, elapsed_s: float) -> RenderableType:
        """All progress in a frame with a bar."""
        facts: dict[str, Any] = {
            "run": f"{self.view['run_id']}, {self.view['task_type']}",
            "groups": self.groups_text(),
            "samples": self.samples_text(),
            "reward": self.reward_text(),
        }
        total = self.view["num_groups_total"]
        if total:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(total, self.num_done, width=BAR_WIDTH), f"{self.num_done} of {total} groups")
            facts = {"done": bar, **facts}
        # A title too long for the frame would be cut, so important facts are inside the frame.
        title = Text(f"{state_text(self.view)} · {elapsed_s:.0f} s")
        return Panel(facts_table(facts), title=title, title_align="left", expand=False, padding=(0, 1))


class LiveDisplay:
    """A panel that is redrawn in place, and removed at the end."""

    def __init__(self, console: Console) -> None:
        self._began_s = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, progress: RunProgress) -> None:
        """Draw the newest progress."""
        self._live.update(progress.as_panel(time.monotonic() - self._began_s))


class LineDisplay:
    """A line every ``interval_s`` seconds, and the last one at the end."""

    def __init__(self, console: Console, interval_s: float = LINE_INTERVAL_S) -> None:
        self._console = console
        self._interval_s = interval_s
        self._began_s = time.monotonic()
        self._next_s = self._began_s
        self._unshown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unshown:
            self._write(self._unshown)

    def show(self, progress: RunProgress) -> None:
        """Print the newest progress, or keep it until the next line is due."""
        now_s = time.monotonic()
        self._unshown = progress.as_line(now_s - self._began_s)
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._write(self._unshown)
            self._unshown = ""

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def make_display(console: Console) -> LiveDisplay | LineDisplay:
    """The display that suits ``console``: live in a terminal, otherwise lines."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)
