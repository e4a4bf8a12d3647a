"""Starts, resumes, restarts and stops runs: connects the routes, the buffer and the run processes."""

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

from forebay.buffer import admission
from forebay.buffer.resume import reconcile
from forebay.buffer.retention import Retention
from forebay.core.backoff import Deadline
from forebay.core.errors import InvalidInput
from forebay.core.ids import new_run_id, new_run_key
from forebay.core.records.log_records import check_fits
from forebay.core.records.rows import StartRow
from forebay.core.run import WORKING, Origin, Run, RunState
from forebay.core.starts.evaluate import Evaluates
from forebay.core.tasks import TaskSet
from forebay.generators.discovery.info import GeneratorInfo, InspectionPending
from forebay.server.runs.launches import Launches, RunParts, set_generator
from forebay.server.runs.replay_starts import ReplayPlan, defaults_of
from forebay.server.runs.resumed_run import find_run, what_is_left
from forebay.server.runs.start_checks import StartRequest

logger = logging.getLogger(__name__)

STOP_WAIT_S = 2.0
"""Seconds that a start waits for an earlier run's process to end; the process is ended in any case."""
RESUME_GRACE_S = 1.0
"""Seconds that the old process of a resumed run has to end: its trainer is gone, and the new one is waiting."""


class RunService:
    """Starts and ends runs.

    A start copies the generator's code, then makes the run's hooks from that copy, then starts the process.
    """

    def __init__(self, parts: RunParts, start_wait_s: float) -> None:
        """``start_wait_s`` is how long a start waits for the verdict on its generator before it replies."""
        self._parts = parts
        self._start_wait_s = start_wait_s
        self._buffer = parts.buffer
        self._supervisor = parts.supervisor
        self._launches = Launches(parts)
        self._starting: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by name, since a client may repeat a start without pause."""
        self._tasks = TaskSet()

    def look_for_generators(self) -> None:
        """Begin to inspect all generators, so that the first start finds their verdicts."""

        async def scan() -> None:
            infos = await self._parts.catalog.scan()
            unknown = self._parts.defaults.tables.keys() - {info.task_type for info in infos}
            if unknown:
                logger.warning("run_defaults has task types without a generator: %s", ", ".join(sorted(unknown)))
            for info in infos:
                if info.status == "failed":
                    logger.warning(
                        "generator %s cannot be used: %s (`forebay generators check` shows more)", info.path, info.error
                    )

        self._tasks.start(scan())

    async def end_processes(self) -> None:
        """End all run processes at shutdown; they start again after a restart."""
        await self._launches.aclose()
        await self._parts.replays.aclose()
        await self._supervisor.end_all()

    async def aclose(self) -> None:
        """Stop all background work. Run processes belong to the supervisor."""
        await self._tasks.cancel()
        await self._launches.aclose()
        await self._parts.replays.aclose()

    # --- starting

    async def start(
        self, payload: dict[str, Any], name: str, origin: Origin, evaluates: Evaluates | None = None
    ) -> Run:
        """Start a run, or attach to an existing one; ``evaluates`` if it is an evaluation of another run.

        Raises ``InvalidInput``, ``StartRefused``, ``StorageFailed``, and ``RunNotFound`` for an unknown ``run_id`` or
        replay source. A replay may also raise ``ReplayDiffers``, ``BodiesGone``, ``NotRecorded``.
        """
        payload, source = await self._parts.replay_starts.completed(payload, origin)
        defaults = defaults_of(payload, self._parts.defaults.missing_in(payload))
        request = replace(StartRequest.parse(payload, name, origin, defaults, source), evaluates=evaluates)
        # Checked first: a start that the store refuses must change nothing.
        check_fits(StartRow(run_id="", document=request.start.document()))
        if origin == "native":
            return await self._start_natively(request)
        async with self._starting[name]:
            same = await self._same_start(request)
            if same is not None:
                return same
            return await self._start(request)

    async def _start_natively(self, request: StartRequest) -> Run:
        """Start a run; a start repeated under its ``start_id`` after a lost reply returns the same run."""
        if not request.start_id:
            return await self._start(request)
        async with self._starting[f"/{request.start_id}"]:  # names contain no slash
            runs = [entry.run for entry in self._buffer.entries if entry.run.origin == "native"]
            same = next((run for run in runs if run.payload.get("start_id") == request.start_id), None)
            return same or await self._start(request)

    async def _start(self, request: StartRequest) -> Run:
        deadline = Deadline(self._start_wait_s)
        async with self._parts.replay_starts.planned(request, deadline.left_s) as plan:
            return await self._start_planned(request, plan, deadline)

    async def _start_planned(self, request: StartRequest, plan: ReplayPlan | None, deadline: Deadline) -> Run:
        generator = await self._checked(request, plan)
        if request.origin == "slime" and request.input_file is not None:
            # So that the run has the digest from the beginning; a large file is read further after the reply.
            await self._parts.files.digest_within(request.input_file, deadline.left_s)
        entry = await find_run(self._buffer, self._parts.files, request)
        if entry is None:
            return await self._add(request, generator, plan)
        run_id = entry.run.run_id
        if plan is not None:
            plan.check_source(entry.run)
        async with self._launches.lock(run_id):  # it can be reached by several names and its id
            try:
                return await self._attach(run_id, request, generator, plan)
            except BaseException:
                if not self._launches.is_under_way(run_id):  # it was stopped in vain
                    self._parts.sources.release(run_id)
                raise

    async def _checked(self, request: StartRequest, plan: ReplayPlan | None) -> GeneratorInfo | None:
        """The generator, after checking it and the input; None while a verdict is pending."""
        recorded = plan.generator if plan is not None else None
        try:
            generator = recorded or await self._parts.catalog.resolve(request.task_type, wait_s=self._start_wait_s)
            await self._launches.check(request, generator, self._start_wait_s)
        except InspectionPending:
            return recorded
        return generator

    async def _same_start(self, request: StartRequest) -> Run | None:
        """The run that an equal payload has already started, if it has no output and nothing has changed."""
        entry = self._buffer.newest(request.name)
        if entry is None or not entry.run.is_alive or entry.run.has_delivered:
            return None
        if not entry.run.start.is_like(request.start):
            return None
        if entry.run.input_fingerprint != await self._parts.files.fingerprint(request.input_file):
            return None  # the same path, but other rows
        if entry.run.state is RunState.VALIDATING:
            return entry.run
        if request.is_fed:
            return entry.run  # a recording does not change
        generator = await self._checked(request, None)
        if generator is None:
            return None
        now = (str(generator.path), generator.sha256)
        return entry.run if now == (entry.run.generator_path, entry.run.generator_sha256) else None

    async def _add(self, request: StartRequest, generator: GeneratorInfo | None, plan: ReplayPlan | None) -> Run:
        self._buffer.store.check_room()
        run = self._new_run(request)
        fingerprint = await self._parts.files.fingerprint(request.input_file)
        try:
            self._hold_source(run.run_id, plan)
            await self._copy_code(run.run_id, 1, generator, plan)
            if request.origin == "slime":  # a stream has one run at a time; a native run may share its name
                await self._stop_earlier(request.name)
            self._adopt(run, request, 1, generator, plan, fingerprint)
            await self._buffer.add(run)
        except BaseException:  # including a cancelled start: no client knows of the run
            self._parts.sources.release(run.run_id)
            await self._parts.folders.remove(run.run_id)
            raise
        self._launches.begin(run.run_id, request, generator)
        left = what_is_left(self._buffer, run)
        if left is not None:
            logger.warning("%s", left)
        return self._buffer.get(run.run_id).run

    async def _copy_code(
        self, run_id: str, number: int, generator: GeneratorInfo | None, plan: ReplayPlan | None
    ) -> None:
        if plan is not None and plan.code_of is not None:
            await self._parts.folders.copy_recorded(run_id, number, plan.code_of)
        elif generator is not None:
            await self._parts.folders.copy_code(run_id, number, generator.path)

    def _hold_source(self, run_id: str, plan: ReplayPlan | None) -> None:
        """Keep all data of the run's replay source from now on."""
        if plan is not None:
            self._parts.sources.hold(run_id, plan.source)

    def _new_run(self, request: StartRequest) -> Run:
        run = Run(
            run_id=new_run_id(),
            run_key=new_run_key(),
            name=request.name,
            origin=request.origin,
            task_type=request.task_type,
            settings=request.settings,
            start=request.start,
            created_at_s=time.time(),
            evaluates=request.evaluates,
        )
        if request.evaluates is not None:  # its calls are keyed and numbered like those of the training run
            run.weights = self._buffer.get(request.evaluates.run_id).run.weights
            run.weight_version = run.weights.version
        return run

    def _adopt(
        self,
        run: Run,
        request: StartRequest,
        number: int,
        generator: GeneratorInfo | None,
        plan: ReplayPlan | None,
        fingerprint: str,
    ) -> None:
        """Begin or restart a run with this payload, and with this generator if it is known."""
        run.start = run.start.again(request.start)
        run.settings, run.defaults = request.settings, request.defaults
        run.input_fingerprint = fingerprint
        run.input_sha256 = self._parts.files.known_digest(request.input_file, run.input_fingerprint)
        run.started_at_s = time.time()
        run.state, run.reason, run.has_ended, run.warnings = RunState.VALIDATING, "", False, []
        run.process_ended_s = None
        run.is_last_slot_reported = run.is_waiting_for_engine = run.has_delivered = False
        run.replay, run.is_fed = None, False
        if plan is not None:
            plan.note(run, is_fed=request.is_fed)
        if generator is not None:
            set_generator(run, number, generator, request)

    async def _stop_earlier(self, name: str, resumed: str = "") -> None:
        """Stop runs of this name, except the one to be resumed; waits at most ``STOP_WAIT_S``."""
        runs = [entry.run for entry in self._buffer.entries if entry.run.run_id != resumed]
        stops = [
            self._tasks.start(self.stop(run.run_id))
            for run in runs
            if run.name == name and run.origin == "slime" and run.state in WORKING
        ]
        if stops:
            await asyncio.wait(stops, timeout=STOP_WAIT_S)

    async def _attach(
        self, run_id: str, request: StartRequest, generator: GeneratorInfo | None, plan: ReplayPlan | None
    ) -> Run:
        number = self._buffer.get(run_id).run.num_starts + 1
        fingerprint = await self._parts.files.fingerprint(request.input_file)
        await self._copy_code(run_id, number, generator, plan)
        if request.origin == "slime":
            await self._stop_earlier(request.name, run_id)
        await self.stop(run_id, RESUME_GRACE_S)
        self._hold_source(run_id, plan)
        # Its process has ended and its lock is held: no other start can change the run now.
        entry = self._buffer.get(run_id)
        self._adopt(entry.run, request, number, generator, plan, fingerprint)
        # A native start without a name must not move a stream's run to the default name.
        if request.name or request.origin == "slime":
            entry.run.name = request.name
        if request.keeps_deliveries:
            async with entry.buffer.lock:
                entry.buffer.groups.adopt(entry.run.settings, entry.run.base_skip)
                await entry.buffer.save_run()
        else:
            await reconcile(entry.delivery.leases, request.listed)
        await admission.expect_repeats(self._buffer.get(run_id).buffer)
        self._buffer.make_newest(run_id)
        if generator is not None:
            await self._buffer.replace_hooks(run_id)
        logger.info("run %s is resumed: %d ids listed", run_id, len(request.listed))
        self._launches.begin(run_id, request, generator)
        return self._buffer.get(run_id).run

    # --- server start, and stopping

    async def resume_all(self) -> None:
        """Restart the runs that were running when the server ended; repeat interrupted validations."""
        for run_id in [entry.run.run_id for entry in self._buffer.entries if entry.run.state in WORKING]:
            async with self._launches.lock(run_id):
                if not self._launches.is_under_way(run_id):  # a client may have started it meanwhile
                    await self._resume(self._buffer.get(run_id).run)

    async def _resume(self, run: Run) -> None:
        if run.state in WORKING and not run.is_fed:
            await self._parts.records.expect_repeats(run.run_id)
        if run.state is RunState.VALIDATING:
            request = StartRequest.parse(run.payload, run.name, run.origin, run.defaults)
            self._launches.begin(run.run_id, request, None, may_have_calls=True)
        elif run.state is RunState.RUNNING:
            await self._launches.relaunch(run)

    async def stop(self, run_id: str, grace_s: float | None = None) -> None:
        """Stop a run's process; its data is kept. Does nothing for a run without one. Raises ``RunNotFound``."""
        await self._launches.end(run_id)
        await self._parts.replays.end(run_id)
        run = self._buffer.get(run_id).run
        if self._supervisor.is_alive(run_id):  # the supervisor records its end
            await self._supervisor.stop(run_id, grace_s)
        elif run.state in WORKING:
            await self._parts.records.end(run_id, RunState.STOPPED, "stopped")

    async def remove(self, run_id: str, retention: Retention) -> None:
        """Remove an ended run and its files. Raises as ``Retention.remove_run``."""
        async with self._launches.lock(run_id):  # no other start can resume it meanwhile
            await retention.remove_run(run_id, self._parts.folders.remove)

    async def log_tail(self, run_id: str, num_lines: int) -> list[str]:
        """The last lines that the run's processes printed. Raises ``RunNotFound``."""
        run = self._buffer.get(run_id).run
        return await self._supervisor.log_tail(self._parts.folders.of(run), num_lines)

    async def agent_log_tail(self, run_id: str, uid: str, num_lines: int) -> list[str]:
        """The last lines that the agent of sample ``uid`` printed. Raises ``RunNotFound``, ``InvalidInput``."""
        printed = await asyncio.to_thread(self._parts.folders.agent_log, self._buffer.get(run_id).run, uid)
        if printed is None:
            hint = "give the uid of a sample whose agent is a command; the newest 64 MiB per start are kept"
            raise InvalidInput(f"no agent output of sample {uid!r} is stored", hint=hint, field="uid")
        return printed.splitlines()[-num_lines:]
