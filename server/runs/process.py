"""One run process, as the server holds it: start, stop, and how it ended."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, Self

from forebay.core.child_process import child_environment, end_session, memory_file, python_argv, read_back
from forebay.generators.process.run_log import log_path
from forebay.generators.process.spec import Report, RunSpec, read_report

_KILLED_WITHIN_S = 1.0
RUNTIME = "forebay.workers.runtime"
"""The main of a run process."""


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


@dataclass(slots=True)
class RunProcess:
    """A running monitor with the run process below it. Call ``start`` to get one, and ``wait`` exactly once."""

    _process: asyncio.subprocess.Process
    _lifeline: int
    _report: BinaryIO

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
        """Start a process that runs ``spec`` in ``working_dir``, with ``environment`` added to ours.

        It logs to ``run_dir``. Raises OSError.
        """
        monitor, limit = "forebay.generators.process.monitor", str(max_log_bytes)
        command = python_argv(monitor, RUNTIME, str(log_path(run_dir)), limit)
        report = memory_file("forebay-report")
        reader, writer = os.pipe()
        try:
            process = await _start_monitor(command, spec, report, reader, working_dir, environment or {})
        except BaseException:  # nobody will read the report: its ends are closed here
            os.close(writer)
            report.close()
            raise
        finally:
            os.close(reader)  # the monitor has its own copy; the other end stays here, and closes when the server dies
        return cls(process, writer, report)

    async def wait(self) -> Report:
        """Wait until the process and everything in its session have ended."""
        await self._process.wait()
        self._close_lifeline()
        with self._report:
            report = read_report(read_back(self._report))
        if report.session:
            # What left the process group is still there, and everything is if the monitor was killed.
            await asyncio.to_thread(end_session, report.session)
        return report

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the process group; when ``grace_s`` are over, SIGKILL. ``wait`` then returns soon."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        if await self._ends_within(grace_s):
            return
        # The monitor reads the other end, and kills the group when it closes; the kernel closes it if the server dies.
        self._close_lifeline()
        if not await self._ends_within(_KILLED_WITHIN_S):
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _ends_within(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


async def _start_monitor(
    command: list[str],
    spec: RunSpec,
    report: BinaryIO,
    lifeline: int,
    working_dir: Path,
    environment: Mapping[str, str],
) -> asyncio.subprocess.Process:
    with memory_file("forebay-spec") as file:
        spec.write(file)
        return await asyncio.create_subprocess_exec(
            *command,
            *(str(file.fileno()), str(report.fileno())),  # the payload may hold keys: no argument, no environment
            stdin=lifeline,
            pass_fds=[file.fileno(), report.fileno()],
            cwd=working_dir,
            env=child_environment(os.environ) | dict(environment),
            start_new_session=True,
        )
