"""Starting, resuming, restarting and stopping runs: what lies between the routes, the buffer and the run processes."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.buffer.buffer import Buffer, Entry
from forebay.core.clock import Clock, SystemClock
from forebay.core.errors import ForebayError, InputRefused, RunNotFound, StartRefused, StorageFailed
from forebay.core.ids import new_run_id, new_run_key
from forebay.core.ports import ProcessOutcome
from forebay.core.run import WORKING, Origin, Run, RunState
from forebay.core.settings import Settings
from forebay.generators.discovery import Catalog
from forebay.generators.info import GeneratorInfo, InspectionPending
from forebay.generators.run_code import copied_module
from forebay.hooks.runner import HookRunner
from forebay.server.resuming import find_resumable
from forebay.server.starts import InputCheck, StartRequest, engine_urls
from forebay.server.supervisor import LaunchSpec, Supervisor

logger = logging.getLogger(__name__)

STOP_WAIT_S = 2.0
"""Seconds that a start waits for the end of an earlier run's process; it is ended in any case."""
RESUME_GRACE_S = 1.0
"""Seconds that the process of a resumed run gets to end: its trainer is gone, and the next one waits for a reply."""


class RunService:
    """Owns the life of runs. It is the ``RunHost`` that the supervisor asks and tells."""

    def __init__(self, settings: Settings, catalog: Catalog, working_dir: Path, clock: Clock | None = None) -> None:
        self._settings = settings
        self._catalog = catalog
        self._clock = clock or SystemClock()
        self._input = InputCheck(settings, working_dir)
        self._runs_dir = settings.data_dir.resolve() / "runs"
        self._starting: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._own_url = settings.public_url
        self._buffer: Buffer
        self._supervisor: Supervisor

    def connect(self, buffer: Buffer, supervisor: Supervisor, own_url: str) -> None:
        """Give it what itself needs this service; once, before the first start."""
        self._buffer, self._supervisor = buffer, supervisor
        self._own_url = self._own_url or own_url

    def look_for_generators(self) -> None:
        """Begin inspecting the generators there are, so that the first start finds the verdicts."""

        async def scan() -> None:
            await self._catalog.scan()

        self._in_background(scan())

    async def aclose(self) -> None:
        """Stop what goes on in the background. Run processes are the supervisor's."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def make_hooks(self, run: Run) -> HookRunner:
        """The hooks of a run, out of the copy of its generator that it keeps."""
        spec = self._launch_spec(run)
        return HookRunner(
            task_type=run.task_type,
            contract=run.settings.contract or run.generator_contract,
            module_path=copied_module(spec.module_path, spec.run_dir) if run.generator_path else None,
            user_hooks=run.generator_hooks,
            time_limit_s=run.settings.hook_time_limit_s,
            log_path=spec.run_dir / "hooks.log",
        )

    def _launch_spec(self, run: Run) -> LaunchSpec:
        run_dir = self._runs_dir / run.run_id / f"start-{run.num_starts}"
        return LaunchSpec(run.run_id, Path(run.generator_path), run_dir, engine_urls(run.payload))

    # --- starting

    async def start(self, payload: dict[str, Any], name: str, origin: Origin) -> Run:
        """Start a run, or attach to one, as design and wire say. Raises ``InvalidInput``, ``StartRefused``."""
        request = StartRequest.parse(payload)
        if origin == "native":
            return await self._start(request, name, origin)
        async with self._starting[name]:
            same = await self._same_start(request, name)
            if same is not None:
                return same
            return await self._start(request, name, origin)

    async def _start(self, request: StartRequest, name: str, origin: Origin) -> Run:
        generator = await self._checked(request)
        entry = find_resumable(self._buffer, request, name, origin)
        if origin == "slime":
            await self._stop_earlier(name, entry)
        if entry is None:
            run = self._new_run(request, name, origin)
            self._adopt(run, request, generator)
            entry = await self._buffer.add(run)
        else:
            await self._attach(entry, request, generator, name)
        if generator is None:
            self._in_background(self._start_when_known(entry.run.run_id, request))
        else:
            self._in_background(self._launch(entry.run.run_id, request, generator))
        return self._buffer.get(entry.run.run_id).run

    async def _checked(self, request: StartRequest) -> GeneratorInfo | None:
        """The generator, after it and the input were looked at; None while its verdict is not there yet."""
        try:
            generator = await self._catalog.resolve(request.task_type, wait_s=self._settings.start_wait_s)
        except InspectionPending:
            return None
        await self._input.check(request, generator)
        return generator

    async def _same_start(self, request: StartRequest, name: str) -> Run | None:
        """The run that an equal payload has already started, if nothing came of it and nothing has changed."""
        entry = self._buffer.newest(name)
        if entry is None or entry.run.payload != request.payload or not entry.run.is_alive or entry.run.has_delivered:
            return None
        if not entry.run.generator_path:
            return entry.run  # its generator is still being inspected
        if entry.run.input_fingerprint != self._input.fingerprint(request):
            return None
        generator = await self._checked(request)
        if generator is None:
            return None
        now = (str(generator.path), generator.sha256)
        return entry.run if now == (entry.run.generator_path, entry.run.generator_sha256) else None

    def _new_run(self, request: StartRequest, name: str, origin: Origin) -> Run:
        return Run(
            run_id=new_run_id(),
            run_key=new_run_key(),
            name=name,
            origin=origin,
            task_type=request.task_type,
            settings=request.settings,
            payload=request.payload,
            created_at_s=self._clock.wall(),
            base_skip=list(request.listed),
            start_skip=list(request.listed),
        )

    def _adopt(self, run: Run, request: StartRequest, generator: GeneratorInfo | None) -> None:
        """Let a run begin (again) with this payload and generator."""
        run.payload, run.settings = request.payload, request.settings
        run.input_fingerprint = self._input.fingerprint(request)
        run.num_starts += 1
        run.started_at_s = self._clock.wall()
        run.state, run.reason, run.has_ended = RunState.VALIDATING, "", False
        run.process_ended_s = None
        run.is_last_slot_reported = run.is_waiting_for_engine = run.has_delivered = False
        if generator is not None:
            self._set_generator(run, generator)

    async def _stop_earlier(self, name: str, resumed: Entry | None) -> None:
        """Stop what runs under the name, but for the run that is about to be resumed; a reply waits only so long."""
        runs = [entry.run for entry in self._buffer.entries if entry is not resumed]
        stops = [
            self._in_background(self.stop(run.run_id))
            for run in runs
            if run.name == name and run.origin == "slime" and run.state in WORKING
        ]
        if stops:
            await asyncio.wait(stops, timeout=STOP_WAIT_S)

    async def _launch(self, run_id: str, request: StartRequest, generator: GeneratorInfo) -> None:
        """Start the process. This may take a while: an engine is told first to drop what an earlier one left behind."""
        await self._buffer.replace_hooks(run_id)
        run = self._buffer.get(run_id).run
        if run.state is not RunState.VALIDATING:
            return  # it was stopped meanwhile
        try:
            await self._supervisor.launch(self._launch_spec(run))
        except StartRefused as error:
            await self._fail(run_id, error)
            return
        self._in_background(self._check_rest(run_id, run.num_starts, request, generator))

    async def _start_when_known(self, run_id: str, request: StartRequest) -> None:
        """Go on with a start whose generator was still being inspected when the reply went out."""
        try:
            generator = await self._catalog.resolve(request.task_type, wait_s=None)
            await self._input.check(request, generator)
            if self._buffer.get(run_id).run.state is RunState.VALIDATING:
                await self._buffer.update(run_id, lambda run: self._set_generator(run, generator))
                await self._launch(run_id, request, generator)
        except ForebayError as error:
            await self._fail(run_id, error)

    @staticmethod
    def _set_generator(run: Run, generator: GeneratorInfo) -> None:
        run.generator_path, run.generator_sha256 = str(generator.path), generator.sha256
        run.generator_hooks, run.is_native_generator = sorted(generator.hooks), generator.imports_base
        run.generator_contract = None if generator.hooks else generator.contract

    async def _check_rest(self, run_id: str, num_starts: int, request: StartRequest, generator: GeneratorInfo) -> None:
        try:
            await self._input.check_rest(request, generator)
        except InputRefused as error:
            if self._buffer.get(run_id).run.num_starts == num_starts:
                await self._supervisor.stop(run_id)
                await self._fail(run_id, error)

    async def _fail(self, run_id: str, error: ForebayError) -> None:
        logger.warning("run %s failed: %s", run_id, error)
        await self._end(run_id, RunState.FAILED, f"{error.message}\n{error.hint}".strip())

    # --- resuming

    async def _attach(self, entry: Entry, request: StartRequest, generator: GeneratorInfo | None, name: str) -> None:
        run_id = entry.run.run_id
        if entry.run.state in WORKING:
            await self.stop(run_id, RESUME_GRACE_S)
        entry = self._buffer.get(run_id)
        self._adopt(entry.run, request, generator)
        entry.run.name = name
        await self._buffer.reconcile(entry, request.listed)
        await self._buffer.expect_repeats(run_id)
        self._buffer.make_newest(run_id)
        logger.info("run %s is resumed: %d ids listed", run_id, len(request.listed))

    # --- the server's own start, and stopping

    async def resume_all(self) -> None:
        """Start again what was running when the server went down."""
        for entry in self._buffer.entries:
            run = entry.run
            if run.has_ended or run.state not in WORKING:
                continue
            request = StartRequest.parse(run.payload)
            if run.state is RunState.VALIDATING and not run.generator_path:
                self._in_background(self._start_when_known(run.run_id, request))
                continue
            try:
                if not run.is_native_generator:
                    await self._repeat_safely(run.run_id)
                await self._supervisor.launch(replace(self._launch_spec(run), may_have_calls=True))
            except StartRefused as error:
                await self._fail(run.run_id, error)

    async def stop(self, run_id: str, grace_s: float | None = None) -> None:
        """End a run's process; its data stays. Nothing happens to a run that has none. Raises ``RunNotFound``."""
        run = self._buffer.get(run_id).run
        if self._supervisor.is_alive(run_id):
            await self._supervisor.stop(run_id, grace_s)
        elif run.state in WORKING:
            await self._end(run_id, RunState.STOPPED, "stopped")

    def log_tail(self, run_id: str, num_lines: int) -> list[str]:
        """The last lines that the run's processes printed. Raises ``RunNotFound``."""
        return self._supervisor.log_tail(self._launch_spec(self._buffer.get(run_id).run).run_dir, num_lines)

    async def _end(self, run_id: str, state: RunState, reason: str) -> None:
        entry = self._buffer.get(run_id)
        now_s = entry.buffer.active.now_s()

        def change(run: Run) -> None:
            run.state, run.reason, run.process_ended_s = state, reason, now_s
            run.is_waiting_for_engine = False

        await self._buffer.update(run_id, change)
        current = self._buffer.get(run_id).buffer
        current.groups.schedule_all(now_s)

    # --- what the supervisor asks and tells

    async def launch_payload(self, run_id: str) -> dict[str, Any]:
        """The caller's payload with the run's private buffer address, and with every id that it need not generate."""
        run = self._buffer.get(run_id).run
        # A generator with our base learns of finished groups and slots by its plan, which is exact per epoch.
        skip = run.base_skip if run.is_native_generator else self._buffer.skip_instance_ids(run_id)
        return {
            "num_repeat_per_sample": run.settings.group_size,
            **run.payload,
            "remote_buffer_url": f"{self._own_url}/w/{run.run_key}",
            "skip_instance_ids": list(skip),
        }

    async def process_started(self, run_id: str, attempt: int) -> None:
        """The run's process is up, for the first time or after a crash."""
        if attempt > 1 and not self._buffer.get(run_id).run.is_native_generator:
            await self._repeat_safely(run_id)

        def change(run: Run) -> None:
            run.state, run.process_ended_s = RunState.RUNNING, None
            run.is_waiting_for_engine = run.is_last_slot_reported = False

        await self._buffer.update(run_id, change)

    async def _repeat_safely(self, run_id: str) -> None:
        try:
            await self._buffer.expect_repeats(run_id)
        except StorageFailed:
            logger.warning("run %s: the journal fails, repeated samples may open further groups", run_id)

    async def process_ended(self, run_id: str, outcome: ProcessOutcome) -> None:
        """The run has no process any more."""
        state = {"returned": RunState.FINISHED, "stopped": RunState.STOPPED, "failed": RunState.FAILED}[outcome.kind]
        log = "\n".join(outcome.log_tail)
        told = "\n".join(part for part in (outcome.error, outcome.traceback, log and f"last log lines:\n{log}") if part)
        try:
            await self._end(run_id, state, told or outcome.kind)
        except RunNotFound:
            logger.warning("a process of run %s ended, which the buffer does not know", run_id)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
