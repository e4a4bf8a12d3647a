"""Interfaces by which a component reaches what is injected from above."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a run's process ended, after its restarts were used up.

    ``error`` is one line, ``traceback`` what Python printed for it (empty for a signal or an exit code), ``log_tail``
    the last lines of the run's log. All three are empty unless ``kind`` is ``failed``.
    """

    kind: Literal["returned", "failed", "stopped"]
    num_attempts: int
    error: str = ""
    traceback: str = ""
    log_tail: list[str] = field(default_factory=list)


class RunHost(Protocol):
    """What the supervisor of run processes needs to know from, and tells to, whoever owns the runs."""

    async def launch_payload(self, run_id: str) -> dict[str, Any]:
        """What ``run_rollout`` is called with. Asked again before each restart: there are more ids to skip by then."""
        ...

    async def process_started(self, run_id: str, attempt: int) -> None:
        """The run's process is up; ``attempt`` is 1 for the first, 2 after the first crash."""
        ...

    async def process_ended(self, run_id: str, outcome: ProcessOutcome) -> None:
        """The run has no process any more and gets no other. Called once; not called when the server shuts down."""
        ...
