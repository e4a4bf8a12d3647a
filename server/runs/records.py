"""Provides what run processes are started with, and stores the outcomes of processes and runs in the buffer."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from forebay.buffer import admission
from forebay.buffer.buffer import Buffer
from forebay.buffer.idle_groups import note_new_process
from forebay.buffer.resume import skip_instance_ids
from forebay.core.addresses import engine_urls
from forebay.core.backoff import Deadline
from forebay.core.errors import ForebayError, RunNotFound, StorageFailed
from forebay.core.run import Run, RunState
from forebay.generators.base import SPARE
from forebay.server.runs.gateway_registration import RunGateway, is_captured
from forebay.server.runs.input_files import InputFiles, num_bytes_of
from forebay.server.runs.process import ProcessOutcome
from forebay.server.tracing.run_traces import RunTraces
from forebay.server.tracing.shared_engines import SharedEngineRecords

logger = logging.getLogger(__name__)

_STATES = {"returned": RunState.FINISHED, "stopped": RunState.STOPPED, "failed": RunState.FAILED}

MAX_EARLIER_RUNS = 8
DIGEST_WAIT_S = 5.0
"""Time limit for the digests of large input files; runs without one by then are left out."""


class RunRecords:
    """What the supervisor reads about runs, and where it records what their processes do."""

    def __init__(self, buffer: Buffer, gateway: RunGateway, own_url: str, traces: RunTraces, files: InputFiles) -> None:
        """``own_url`` is where run processes reach this server."""
        self.on_ended: Callable[[str], None] = lambda _: None
        """Called for each run that no longer has a process and is no longer fed."""
        self._buffer = buffer
        self._gateway = gateway
        self._own_url = own_url
        self._traces = traces
        self._shared = SharedEngineRecords(traces)
        self._files = files

    async def launch_payload(self, run_id: str) -> dict[str, Any]:
        """The caller's payload with the run's private buffer address and all ids that need not be generated again.

        Called before each restart, because there are more ids to skip by then.
        """
        entry = self._buffer.get(run_id)
        run = entry.run
        # A generator with our base learns of finished groups and slots from its plan, which is exact per epoch.
        skip = run.base_skip if run.is_native_generator else await skip_instance_ids(entry.buffer)
        return {
            "num_repeat_per_sample": run.settings.group_size,  # a caller may have sent group_size instead
            **({"num_process": SPARE} if run.evaluates is not None and run.is_native_generator else {}),
            **run.payload,
            "remote_buffer_url": f"{self._own_url}/w/{run.run_key}",
            **await self._captured(run),
            "skip_instance_ids": list(skip),
        }

    async def _captured(self, run: Run) -> dict[str, str]:
        """Gateway addresses for the calls and samples of a captured generator; empty if it is not captured."""
        if not is_captured(run):
            return {}
        url = await self._gateway.capture_url(run)
        # Generators append to the address they are given: some clients expect /v1 in it, others add it.
        is_versioned = all(each.rstrip("/").endswith("/v1") for each in engine_urls(run.payload))
        return {"remote_engine_url": f"{url}/v1" if is_versioned else url, "remote_buffer_url": url}

    async def process_started(self, run_id: str, attempt: int) -> None:
        """Record that the run's process is up, for the first time or after a crash."""
        if attempt > 1:  # before the state changes: its first sample may come right after
            await self.expect_repeats(run_id)

        def change(run: Run) -> None:
            run.state, run.process_ended_s = RunState.RUNNING, None
            run.is_waiting_for_engine = run.is_gateway_waiting = run.is_held = run.is_last_slot_reported = False

        # Before the run is visibly running: from then on its trace exists, for stalls too.
        self.note_process(run_id, "restarted" if attempt > 1 else "started")
        await self._buffer.update(run_id, change)

    async def earlier_traces(self, run_id: str) -> list[str]:
        """Trace folders of earlier runs of the same task type and input, newest first, for policies that use them.

        Empty for a run without its own scheduler. An error while searching does not fail the start.
        """
        try:
            return [str(self._traces.folder_of(each)) for each in await self._earlier_runs(run_id)]
        except Exception:
            logger.exception("run %s: the traces of earlier runs cannot be found and are not used", run_id)
            return []

    async def _earlier_runs(self, run_id: str) -> list[str]:
        run, found = self._buffer.get(run_id).run, list[str]()
        if run.settings.scheduler is None or _file_of(run) is None:
            return found
        deadline = Deadline(DIGEST_WAIT_S)
        for other in [entry.run for entry in reversed(list(self._buffer.entries))]:
            is_other = other.run_id != run_id and other.task_type == run.task_type
            if is_other and await self._have_same_input(run, other, deadline):
                found.append(other.run_id)
                if len(found) == MAX_EARLIER_RUNS:
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
        """Digest of the run's input file at its start; "" if unknown."""
        file = _file_of(run)
        if run.input_sha256 or file is None:
            return run.input_sha256
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._files.digest_at(*file), deadline.left_s)
        return ""

    def process_settings(self, run_id: str) -> dict[str, Any]:
        """Trace settings for the run's process."""
        return self._traces.process_settings(self._buffer.get(run_id).run)

    def note_process(self, run_id: str, what: Literal["started", "ended", "failed", "restarted"]) -> None:
        """Record a change of the run's process in its trace, and in those of runs with the same engines."""
        engines = list[str]()
        with suppress(RunNotFound):
            entry = self._buffer.get(run_id)
            entry.buffer.changes.process_changed(what)
            if what in ("started", "restarted"):
                engines = engine_urls(entry.run.payload)
        self._shared.note(run_id, engines)

    async def expect_repeats(self, run_id: str) -> None:
        """Prepare for a new process after one that died; only our base knows which samples the first one wrote."""
        entry = self._buffer.get(run_id)
        is_native = entry.run.is_native_generator
        try:
            # Its groups are idle from now on, not only once it asks for its plan, since it may start slowly.
            await (note_new_process if is_native else admission.expect_repeats)(entry.buffer)
        except StorageFailed:
            what = "its groups keep ageing" if is_native else "repeated samples may open further groups"
            logger.warning("run %s: the journal cannot be written: %s", run_id, what)

    async def process_ended(self, run_id: str, outcome: ProcessOutcome) -> None:
        """Record how the run's process ended."""
        log = "\n".join(outcome.log_tail)
        parts = (outcome.error, outcome.traceback, log and f"last log lines:\n{log}")
        reason = "\n".join(part for part in parts if part) or outcome.kind
        try:
            await self.end(run_id, _STATES[outcome.kind], reason)
        except RunNotFound:
            logger.warning("a process ended of run %s, which the buffer does not have", run_id)

    async def fail(self, run_id: str, error: ForebayError) -> None:
        """Record that the run failed to start or to continue."""
        logger.warning("run %s failed: %s", run_id, error)
        await self.end(run_id, RunState.FAILED, f"{error.message}\n{error.hint}".strip())

    async def end(self, run_id: str, state: RunState, reason: str) -> None:
        """End a run that has no process and will not get one. Raises ``RunNotFound``."""
        now_s = self._buffer.get(run_id).buffer.active.now_s()

        def change(run: Run) -> None:
            run.state, run.reason, run.process_ended_s = state, reason, now_s
            run.is_waiting_for_engine = run.is_gateway_waiting = run.is_held = False

        await self._buffer.update(run_id, change)
        self.on_ended(run_id)
        await self._gateway.look(run_id)


def _file_of(run: Run) -> tuple[str, str] | None:
    """The input file of a run's last start, and its fingerprint at that time."""
    given = run.payload.get("input_file")
    return (given, run.input_fingerprint) if isinstance(given, str) and run.input_fingerprint else None
