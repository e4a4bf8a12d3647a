"""Which earlier runs have recorded how long answers to the same input are, for policies that go by that."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forebay.buffer.buffer import Buffer
from forebay.core.run import Run
from forebay.core.waiting import Deadline
from forebay.server.runs.input_contents import InputContents
from forebay.server.runs.start_checks import num_bytes_of

MAX_RUNS = 8
WAIT_S = 5.0
"""For what large input files hold; after it, runs of which that is not known yet are left out."""


class EarlierTraces:
    """Finds the runs of the same task type and input on this server."""

    def __init__(self, buffer: Buffer, contents: InputContents, folder_of: Callable[[str], Path]) -> None:
        """``folder_of`` a run's id: where its trace lies."""
        self._buffer, self._contents, self._folder_of = buffer, contents, folder_of

    async def of(self, run_id: str) -> list[str]:
        """The folders of their traces, newest first; a run without a scheduler of its own looks at none."""
        run = self._buffer.get(run_id).run
        if run.settings.scheduler is None or _file_of(run) is None:
            return []
        deadline, found = Deadline(WAIT_S), list[str]()
        for other in [entry.run for entry in reversed(list(self._buffer.entries))]:
            is_other = other.run_id != run_id and other.task_type == run.task_type
            if is_other and await self._have_same_input(run, other, deadline):
                found.append(str(self._folder_of(other.run_id)))
                if len(found) == MAX_RUNS:
                    break
        return found

    async def _have_same_input(self, run: Run, other: Run, deadline: Deadline) -> bool:
        if _file_of(run) == _file_of(other):
            return True
        if num_bytes_of(run.input_fingerprint) != num_bytes_of(other.input_fingerprint):
            return False
        digest = await self._digest(run, deadline)
        return bool(digest) and digest == await self._digest(other, deadline)

    async def _digest(self, run: Run, deadline: Deadline) -> str:
        """What its input file held at its start; "" where nobody knows."""
        file = _file_of(run)
        if run.input_sha256 or file is None:
            return run.input_sha256
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._contents.of_start(*file), deadline.left_s)
        return ""


def _file_of(run: Run) -> tuple[str, str] | None:
    """The input file of a run's last start, and its fingerprint then."""
    given = run.payload.get("input_file")
    return (given, run.input_fingerprint) if isinstance(given, str) and run.input_fingerprint else None
