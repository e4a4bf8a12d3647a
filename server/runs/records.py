"""What run processes are given, and what becomes of them and their runs, written down in the buffer."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from forebay.buffer import admission
from forebay.buffer.buffer import Buffer
from forebay.buffer.idle_groups import note_new_process
from forebay.core.addresses import engine_urls
from forebay.core.errors import ForebayError, RunNotFound, StorageFailed
from forebay.core.run import Run, RunState
from forebay.server.runs.earlier_traces import EarlierTraces
from forebay.server.runs.gateway_registration import RunGateway, is_captured
from forebay.server.runs.process import ProcessOutcome
from forebay.server.tracing.run_traces import RunTraces

logger = logging.getLogger(__name__)

_STATES = {"returned": RunState.FINISHED, "stopped": RunState.STOPPED, "failed": RunState.FAILED}


class RunRecords:
    """What the supervisor of run processes asks, and where it notes what they do."""

    def __init__(
        self, buffer: Buffer, gateway: RunGateway, own_url: str, traces: RunTraces, earlier: EarlierTraces
    ) -> None:
        """``own_url`` is where run processes reach this server."""
        self.on_ended: Callable[[str], None] = lambda _: None
        """Told of each run that has no process any more, and is fed no more."""
        self._earlier = earlier
        self._buffer = buffer
        self._gateway = gateway
        self._own_url = own_url
        self._traces = traces

    async def launch_payload(self, run_id: str) -> dict[str, Any]:
        """The caller's payload with the run's private buffer address, and with every id that it need not generate.

        Asked before each restart: there are more ids to skip by then.
        """
        run = self._buffer.get(run_id).run
        # A generator with our base learns of finished groups and slots by its plan, which is exact per epoch.
        skip = run.base_skip if run.is_native_generator else await self._buffer.skip_instance_ids(run_id)
        return {
            "num_repeat_per_sample": run.settings.group_size,  # a caller may have sent group_size instead
            **run.payload,
            "remote_buffer_url": f"{self._own_url}/w/{run.run_key}",
            **await self._captured(run),
            "skip_instance_ids": list(skip),
        }

    async def _captured(self, run: Run) -> dict[str, str]:
        """The addresses by which a foreign generator's calls and samples come through the gateway, if they are to."""
        if not is_captured(run):
            return {}
        url = await self._gateway.capture_url(run)
        # Generators append to what they are given: some clients want the /v1 in it, others add it.
        is_versioned = all(each.rstrip("/").endswith("/v1") for each in engine_urls(run.payload))
        return {"remote_engine_url": f"{url}/v1" if is_versioned else url, "remote_buffer_url": url}

    async def process_started(self, run_id: str, attempt: int) -> None:
        """The run's process is up, for the first time or after a crash."""
        if attempt > 1:  # before the state changes: its first sample may come right after
            await self.expect_repeats(run_id)

        def change(run: Run) -> None:
            run.state, run.process_ended_s = RunState.RUNNING, None
            run.is_waiting_for_engine = run.is_gateway_waiting = run.is_held = run.is_last_slot_reported = False

        # Before anybody can see that it runs: from then on its trace is there, for a standstill too.
        self.note_process(run_id, "restarted" if attempt > 1 else "started")
        await self._buffer.update(run_id, change)

    async def earlier_traces(self, run_id: str) -> list[str]:
        """Where earlier runs of the same input are recorded; what goes wrong in finding them costs no start."""
        try:
            return await self._earlier.of(run_id)
        except Exception:
            logger.exception("run %s: what earlier runs have recorded cannot be found, and is not used", run_id)
            return []

    def process_settings(self, run_id: str) -> dict[str, Any]:
        """What the run's process is told about its trace."""
        return self._traces.process_settings(self._buffer.get(run_id).run)

    def note_process(self, run_id: str, what: Literal["started", "ended", "failed", "restarted"]) -> None:
        """Record in the run's trace what became of its process."""
        with suppress(RunNotFound):
            self._buffer.get(run_id).buffer.changes.process_changed(what)

    async def expect_repeats(self, run_id: str) -> None:
        """Another process of the run follows one that died; only our base knows which samples the first one wrote."""
        entry = self._buffer.get(run_id)
        is_native = entry.run.is_native_generator
        try:
            # Its groups are idle from now on, and not only once it asks for its plan: it may take its time to begin.
            await (note_new_process if is_native else admission.expect_repeats)(entry.buffer)
        except StorageFailed:
            what = "its groups age meanwhile" if is_native else "repeated samples may open further groups"
            logger.warning("run %s: the journal fails, %s", run_id, what)

    async def process_ended(self, run_id: str, outcome: ProcessOutcome) -> None:
        """The run has no process any more."""
        log = "\n".join(outcome.log_tail)
        parts = (outcome.error, outcome.traceback, log and f"last log lines:\n{log}")
        reason = "\n".join(part for part in parts if part) or outcome.kind
        try:
            await self.end(run_id, _STATES[outcome.kind], reason)
        except RunNotFound:
            logger.warning("a process of run %s ended, which the buffer does not know", run_id)

    async def fail(self, run_id: str, error: ForebayError) -> None:
        """The run cannot start, or go on."""
        logger.warning("run %s failed: %s", run_id, error)
        await self.end(run_id, RunState.FAILED, f"{error.message}\n{error.hint}".strip())

    async def end(self, run_id: str, state: RunState, reason: str) -> None:
        """The run has no process, and will have none. Raises ``RunNotFound``."""
        now_s = self._buffer.get(run_id).buffer.active.now_s()

        def change(run: Run) -> None:
            run.state, run.reason, run.process_ended_s = state, reason, now_s
            run.is_waiting_for_engine = run.is_gateway_waiting = run.is_held = False

        await self._buffer.update(run_id, change)
        self.on_ended(run_id)
        await self._gateway.look(run_id)
