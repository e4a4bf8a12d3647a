"""One run process as the server manages it: start, stop, and how it ended."""

import asyncio
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from forebay.core.child_process import end_session
from forebay.core.processes.child_link import ChildEnded, ChildLink
from forebay.generators.process.run_logs import log_path
from forebay.generators.process.spec import Report, ReportPart, RunSpec

_KILLED_WITHIN_S = 1.0
RUNTIME = "forebay.workers.runtime"
"""Main module of a run process."""


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a run's process ended, after its restarts were used up.

    ``error`` is one line, ``traceback`` is Python's (empty for a signal or an exit code), and ``log_tail`` has the
    last lines of the run's log. All three are empty unless ``kind`` is ``failed``.
    """

    kind: Literal["returned", "failed", "stopped"]
    num_attempts: int
    error: str = ""
    traceback: str = ""
    log_tail: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RunProcess:
    """A running monitor process with the run process below it. Create it with ``start``; call ``wait`` exactly once."""

    monitor: ChildLink[ReportPart]

    @classmethod
    async def start(
        cls,
        spec: RunSpec,
        *,
        run_dir: Path,
        working_dir: Path,
        environment: Mapping[str, str] | None = None,
        max_log_bytes: int = 32 << 20,
    ) -> Self:
        """Start a process that runs ``spec`` in ``working_dir``, with ``environment`` added to the server's.

        Its log goes to ``run_dir``. Raises OSError.
        """
        return cls(
            await ChildLink.start(
                "forebay.generators.process.monitor",
                *(RUNTIME, str(log_path(run_dir)), str(max_log_bytes)),
                setup=spec.encode(),
                reads=ReportPart,
                cwd=working_dir,
                env=environment or {},
            )
        )

    async def wait(self) -> Report:
        """Wait until the process and everything in its session have ended."""
        os_session, last = 0, ReportPart()
        try:
            while True:
                last = await self.monitor.receive()
                os_session = os_session or last.os_session
        except ChildEnded as ended:
            code = ended.code
        if os_session:
            # Processes that left the group still run; if the monitor was killed, all of them do.
            await asyncio.to_thread(end_session, os_session)
        return Report(last.is_returned, last.error, last.traceback, code, last.is_invalid_input)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the process group, and SIGKILL after ``grace_s`` seconds. ``wait`` then returns soon."""
        self.monitor.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.monitor.ended(), grace_s)
        # The monitor kills the session when this end closes; the kernel closes it if the server dies.
        self.monitor.hang_up()
        await self.monitor.end(_KILLED_WITHIN_S)
