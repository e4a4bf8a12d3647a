"""The part of a start that follows its reply: a slow generator's verdict, the process, the rest of the input."""

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from forebay.buffer.buffer import Buffer
from forebay.core.addresses import engine_urls
from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.run import DEFAULT_BACKEND, Run, RunState
from forebay.generators.discovery.catalog import Catalog
from forebay.generators.discovery.info import GeneratorInfo
from forebay.server.runs.folders import RunFolders
from forebay.server.runs.input_files import InputFiles
from forebay.server.runs.records import RunRecords
from forebay.server.runs.replay_sources import ReplaySources
from forebay.server.runs.replay_starts import ReplayStarts, note_code
from forebay.server.runs.replays import Replays
from forebay.server.runs.start_checks import StartCheck, StartRequest
from forebay.server.runs.start_fields import RunDefaults, start_warnings
from forebay.server.runs.supervisor import LaunchSpec, Supervisor

logger = logging.getLogger(__name__)


def set_generator(run: Run, number: int, generator: GeneratorInfo, request: StartRequest) -> None:
    """Set the generator of start ``number`` of the run, which already has its copy, and the warnings of the start."""
    run.num_starts = number
    run.generator_path, run.generator_sha256 = str(generator.path), generator.sha256
    run.generator_files = generator.files
    run.generator_hooks, run.is_native_generator = sorted(generator.hooks), generator.imports_base
    run.generator_contract = None if generator.hooks else generator.contract
    run.warnings = [*start_warnings(run.payload), *request.warnings]
    note_code(run)
    for warning in run.warnings:
        logger.warning("run %s: %s", run.run_id, warning)


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts that start, run and end runs."""

    buffer: Buffer
    catalog: Catalog
    folders: RunFolders
    records: RunRecords
    supervisor: Supervisor
    check: StartCheck
    files: InputFiles
    defaults: RunDefaults
    sources: ReplaySources
    replay_starts: ReplayStarts
    replays: Replays


class Launches:
    """One task per run that is starting. If a task fails, its run becomes ``failed``."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def lock(self, run_id: str) -> asyncio.Lock:
        """Lock to hold while a run gets the code and hooks of another start."""
        return self._locks[run_id]

    def is_under_way(self, run_id: str) -> bool:
        """Whether the run is starting, has its process, or is being fed from a recording."""
        parts = self._parts
        return run_id in self._tasks or parts.supervisor.is_alive(run_id) or parts.replays.is_alive(run_id)

    async def check(self, request: StartRequest, generator: GeneratorInfo, wait_s: float | None) -> None:
        """Check a start and those of its evaluations. Raises as ``StartCheck.check`` and ``Catalog.resolve``."""
        await self._parts.check.check(request, generator)
        if (evaluate := request.settings.evaluate) is None:
            return
        for task in evaluate.tasks:
            try:
                made = StartRequest.parse(evaluate.payload(request.payload, task), "", "native", {})
                await self._parts.check.check(made, await self._parts.catalog.resolve(made.task_type, wait_s=wait_s))
            except ForebayError as error:
                field = f"evaluate.tasks.{task}" + (f".{error.field}" if error.field else "")
                text = f"evaluation task {task!r}: {error.message}"
                raise InvalidInput(text, hint=error.hint, field=field) from error

    def begin(
        self, run_id: str, request: StartRequest, generator: GeneratorInfo | None, *, may_have_calls: bool = False
    ) -> None:
        """Continue a start in the background. Without a generator, wait for its verdict.

        An earlier start of the run must have been ended. ``may_have_calls`` goes to the supervisor.
        """
        work = self._start(run_id, request, generator, may_have_calls=may_have_calls)
        self._tasks[run_id] = task = asyncio.create_task(work, name=f"start {run_id}")
        task.add_done_callback(lambda done: self._forget(run_id, done))

    async def end(self, run_id: str) -> None:
        """Cancel the rest of a start; a started process is kept. Does nothing for a run that is not starting."""
        task = self._tasks.get(run_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def aclose(self) -> None:
        """Cancel all starts."""
        for run_id in list(self._tasks):
            await self.end(run_id)

    def _forget(self, run_id: str, done: "asyncio.Task[None]") -> None:
        if self._tasks.get(run_id) is done:  # the run may have begun another start since
            del self._tasks[run_id]

    async def _start(
        self, run_id: str, request: StartRequest, generator: GeneratorInfo | None, *, may_have_calls: bool
    ) -> None:
        parts = self._parts
        try:
            # If the recording's code judges, the run has had its copy since before it was accepted.
            is_code_there = request.replay is not None and not request.replay.uses_code_of_today
            if generator is None and not is_code_there:
                generator = await self._when_known(run_id, request)
            run = parts.buffer.get(run_id).run
            if run.state is not RunState.VALIDATING:
                return  # it was stopped meanwhile
            if run.num_starts == 1:
                # The run has its final hooks, and no process yet.
                started = {"run_id": run_id, "task_type": run.task_type, "name": run.name}
                parts.buffer.get(run_id).buffer.hooks.notify("run_started", **started)
            if run.is_fed:
                parts.replays.begin(run_id)
                return
            await parts.supervisor.launch(self._spec(run, may_have_calls=may_have_calls))
            # In parallel with the process: a file of millions of rows would delay its first rollout.
            if generator is not None:
                await parts.check.check_rest(request, generator)
            await self._note_content(run_id, request)
        except ForebayError as error:
            await parts.supervisor.stop(run_id)
            parts.sources.release(run_id)
            await parts.records.fail(run_id, error)

    async def _when_known(self, run_id: str, request: StartRequest) -> GeneratorInfo:
        """Wait for the generator's verdict, and begin the run with its code."""
        parts = self._parts
        generator = await parts.catalog.resolve(request.task_type, wait_s=None)
        await self.check(request, generator, None)
        async with self.lock(run_id):
            number = parts.buffer.get(run_id).run.num_starts + 1
            await parts.folders.copy_code(run_id, number, generator.path)
            # Hooks are made from the copy: it must exist before the run names it.
            await parts.buffer.update(run_id, lambda run: set_generator(run, number, generator, request))
            await parts.buffer.replace_hooks(run_id)
        return generator

    async def _note_content(self, run_id: str, request: StartRequest) -> None:
        """Store the digest of the input file at the start, if the reply went out before it was known."""
        parts, run = self._parts, self._parts.buffer.get(run_id).run
        if request.input_file is None or run.input_sha256:
            return
        digest = await parts.files.digest_at(request.input_file, run.input_fingerprint)

        def note(run: Run) -> None:
            run.input_sha256 = digest

        if digest:
            await parts.buffer.update(run_id, note)

    async def relaunch(self, run: Run) -> None:
        """Restart a run after a restart of the server: start its process, or continue to feed it."""
        try:
            if not (run.replay and self._parts.folders.has_code(run)):  # the generator file may be gone by now
                await self._parts.folders.restore_code(run)
        except ForebayError as error:
            await self._parts.records.fail(run.run_id, error)
            return
        if run.is_fed:
            self._parts.replays.begin(run.run_id)
        else:
            await self._parts.supervisor.launch(self._spec(run, may_have_calls=True))

    def _spec(self, run: Run, *, may_have_calls: bool) -> LaunchSpec:
        urls, settings = engine_urls(run.payload), run.settings
        return LaunchSpec(
            run.run_id,
            Path(run.generator_path),
            self._parts.folders.of(run),
            urls,
            may_have_calls,
            settings.workers or [],
            settings.backend or DEFAULT_BACKEND,
        )
