"""One worker of a run, as its lead has it."""

from dataclasses import dataclass, field
from typing import Literal

from forebay.generators.buffer_link.abc import WorkerReport
from forebay.workers.rollouts.messages import ToWorker
from forebay.workers.rollouts.worker_line import WorkerLine

WorkerState = Literal["unplaced", "starting", "ready", "lost"]


@dataclass(eq=False)
class PlacedWorker:
    """One worker, until it is gone."""

    number: int
    num_restarts: int = 0
    state: WorkerState = "starting"
    rollouts: set[str] = field(default_factory=set)
    """Those in flight, by uid."""
    reserved_for: str | None = None
    """The rollout that runs alone in it."""
    reason: str = ""
    """Why it has no place, or why the one before it is gone."""
    blocked_s: float = 0.0
    """For how long the event loop of the user's code has stood still."""
    blocked_at: str = ""
    line: WorkerLine | None = None

    def send(self, message: ToWorker) -> None:
        """Send one, unless it is gone."""
        if self.line is not None and self.state != "lost":
            self.line.send(message)

    def report(self) -> WorkerReport:
        """How it is."""
        vitals = self.line.vitals if self.line is not None else None
        return WorkerReport(
            number=self.number,
            node=vitals.node if vitals is not None else "",
            state=self.state,
            num_in_flight=len(self.rollouts),
            num_restarts=self.num_restarts,
            rss_bytes=vitals.rss_bytes if vitals is not None else 0,
            blocked_s=round(self.blocked_s, 1),
            blocked_at=self.blocked_at,
            reason=self.reason,
        )
