"""One run process, as the server holds it: start, stop, and how it ended."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, Self

from forebay.core.child_process import child_environment, memory_file, python_argv, read_back
from forebay.generators.process.run_log import LOG_LIMIT_BYTES, log_path
from forebay.generators.process.spec import Report, RunSpec, read_report

_KILLED_WITHIN_S = 5.0


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
    async def start(cls, spec: RunSpec, *, run_dir: Path, working_dir: Path) -> Self:
        """Start a process that runs ``spec`` in ``working_dir`` and logs to ``run_dir``. Raises OSError."""
        report = memory_file("forebay-report")
        reader, writer = os.pipe()
        try:
            process = await _start_monitor(spec, report, reader, run_dir, working_dir)
        except BaseException:  # nobody will read the report: its ends are closed here
            os.close(writer)
            report.close()
            raise
        finally:
            os.close(reader)  # the monitor has its own copy; the other end stays here, and closes when the server dies
        return cls(process, writer, report)

    async def wait(self) -> Report:
        """Wait until the process and everything in its group have ended."""
        await self._process.wait()
        self._close_lifeline()
        with self._report:
            return read_report(read_back(self._report))

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
    spec: RunSpec, report: BinaryIO, lifeline: int, run_dir: Path, working_dir: Path
) -> asyncio.subprocess.Process:
    with memory_file("forebay-spec") as file:
        spec.write(file)
        return await asyncio.create_subprocess_exec(
            *python_argv("forebay.generators.process.monitor", str(log_path(run_dir)), str(LOG_LIMIT_BYTES)),
            *(str(file.fileno()), str(report.fileno())),  # the payload may hold keys: no argument, no environment
            stdin=lifeline,
            pass_fds=[file.fileno(), report.fileno()],
            cwd=working_dir,
            env=child_environment(os.environ),
            start_new_session=True,
        )
