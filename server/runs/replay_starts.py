"""A start that replays a recording: what it takes over from it, and whether it asks for what was recorded."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.buffer.buffer import Buffer
from forebay.core.errors import InvalidInput, StartRefused
from forebay.core.group import SLIME_REWARD_RANGE
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.records.rows import GroupRow
from forebay.core.run import WORKING, Origin, Run
from forebay.core.starts.payload_text import check_texts
from forebay.generators.discovery.info import GeneratorInfo
from forebay.replay.conditions import (
    NOT_NEEDED,
    OF_A_PROCESS,
    OF_ONE_START,
    code_in_words,
    in_words,
    is_as_recorded,
    may_differ,
    must_agree,
)
from forebay.replay.errors import NotRecorded, ReplayDiffers
from forebay.replay.options import ReplayOptions
from forebay.replay.recording_secrets import is_own_affair
from forebay.replay.source import Source
from forebay.replay.step_filter import check_bodies, weight_versions
from forebay.server.runs.folders import RunFolders
from forebay.server.runs.input_files import InputFiles
from forebay.server.runs.replay_sources import ReplaySources, groups_of
from forebay.server.runs.start_checks import StartRequest

GROUP_SIZE_NAMES = frozenset({"num_repeat_per_sample", "group_size"})
CODE = "generator_sha256"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a start is going to replay, after it was compared with what was recorded."""

    options: ReplayOptions
    recorded: RecordedRun
    source: str
    """The run's id, or the file's path."""
    num_groups: int
    differences: list[dict[str, Any]]
    """What may differ, and is shown."""
    left_out: dict[str, Any] | None
    """How many of the groups a file has without their samples, and which is the ``first``; None if there is none."""
    warnings: list[str]
    """What else the caller should know of the recording before it is replayed."""
    code_of: Run | None
    """The run whose copy of the code is used; None for the generator as it is today."""

    def note(self, run: Run, *, is_fed: bool) -> None:
        """Write down in a run what it replays."""
        run.is_fed = is_fed
        if is_fed:
            run.num_groups_total = self.num_groups
            run.input_sha256 = run.input_sha256 or self.recorded.input_sha256
        run.replay = {
            "source": self.source,
            "name": self.recorded.name,
            "mode": self.options.mode,
            "rewards": self.options.rewards,
            "steps": self.options.steps,
            "recorded_at_s": self.recorded.created_at_s,
            CODE: self.recorded.generator_sha256,
            "generator_files": self.recorded.generator_files,
            "differences": self.differences,
            "left_out": self.left_out,
            "warnings": self.warnings,
        }

    def check_source(self, run: Run) -> None:
        """Raise ``InvalidInput`` if ``run``, which goes on with it, was fed something else so far."""
        fed_from = run.replay["source"] if run.is_fed and run.replay is not None else self.source
        if fed_from != self.source:
            raise InvalidInput(
                f"run {run.run_id} replays {fed_from}, and {self.options.source!r} is {self.source} by now",
                hint=f"replay {fed_from} to go on with the run, or leave it alone",
                field="replay.source",
            )

    @property
    def generator(self) -> GeneratorInfo | None:
        """What is known of the recorded code; None where that of today is used."""
        run = self.code_of
        if run is None:
            return None
        return GeneratorInfo(
            path=Path(run.generator_path),
            source="user",
            sha256=run.generator_sha256,
            status="ok",
            task_type=run.task_type,
            imports_base=run.is_native_generator,
            contract=run.generator_contract,
            files=run.generator_files,
            hooks=dict.fromkeys(run.generator_hooks, ""),
        )


def note_code(run: Run) -> None:
    """Once the run's generator is known: warn of all that is otherwise than it was recorded."""
    if run.replay is None:
        return
    recorded, others = run.replay[CODE], [each for each in run.replay["differences"] if each["field"] != CODE]
    words = in_words(others)
    if recorded and recorded != run.generator_sha256:
        others.append({"field": CODE, "recorded": recorded, "now": run.generator_sha256})
        words.append(code_in_words(run.replay.get("generator_files", {}), run.generator_files))
    run.replay = {**run.replay, "differences": others}
    run.warnings = [*run.warnings, *words, *run.replay.get("warnings", [])]


def defaults_of(payload: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Those of the server's ``defaults`` that hold for a start of this ``payload``.

    What a replay does not say is as it was recorded: only how its process works, if it has one, is left to them.
    """
    options = ReplayOptions.parse(payload.get("replay"))
    if options is None:
        return defaults
    return {name: each for name, each in defaults.items() if options.needs_process and not is_as_recorded(name)}


class ReplayStarts:
    """Looks at starts that replay something."""

    def __init__(self, buffer: Buffer, sources: ReplaySources, folders: RunFolders, files: InputFiles) -> None:
        self._buffer = buffer
        self._sources = sources
        self._folders = folders
        self._files = files

    async def completed(self, payload: dict[str, Any], origin: Origin) -> tuple[dict[str, Any], str]:
        """A payload with what it leaves out and its recording says, and the run or file that it replays.

        One that replays nothing stays as it is, and its source is "". Raises ``InvalidInput``, ``RunNotFound``,
        ``NotRecorded``, ``InputRefused``.
        """
        # One that is null is named: it replays nothing.
        given = payload.get("replay", self._sources.default if origin == "slime" else None)
        options = ReplayOptions.parse(given)
        if options is None:
            return payload, ""
        _check_options(options)
        found = await self._sources.find(options)
        async with self._sources.opened(options, found) as source:
            recorded = source.run
        taken = _taken_over(recorded, payload, origin, options)
        if options.is_file:
            check_texts(taken)
            _check_own_affairs(taken)
        return {**taken, **payload, "replay": given}, found

    @asynccontextmanager
    async def planned(self, request: StartRequest, wait_s: float) -> AsyncIterator[ReplayPlan | None]:
        """What the start replays; None for nothing. Within it nothing of that is removed: its run then holds it.

        ``wait_s`` is how long a large input file is read. Raises ``ReplayDiffers``, ``BodiesGone``, ``NotRecorded``,
        ``InvalidInput``, ``StartRefused``.
        """
        options, found = request.replay, request.source
        if options is None:
            yield None
            return
        _check_process(request)
        if found == request.payload.get("run_id"):
            raise InvalidInput("a run cannot replay itself", hint="leave run_id out", field="run_id")
        async with self._sources.kept(found):
            yield await self._plan(request, options, found, wait_s)

    async def _plan(self, request: StartRequest, options: ReplayOptions, found: str, wait_s: float) -> ReplayPlan:
        async with self._sources.opened(options, found) as source:
            recorded, rows = source.run, await self._rows(request, wait_s)
            differences = must_agree(recorded, request.payload, input_sha256=rows, ignore=options.ignore)
            if differences:
                raise ReplayDiffers(differences)
            groups = await groups_of(source, options)
            if options.mode == "only":  # else what is missing is generated
                if not groups and not options.needs_process:
                    raise _nothing_there(recorded, found)
                await check_bodies(source, groups)
            left_out = _left_out(source, groups)
            warnings = await _warnings(source, groups, options, request.settings.max_staleness)
        shown = may_differ(recorded, request.payload, input_sha256=rows)
        code_of = self._code_of(options, found)
        return ReplayPlan(options, recorded, found, len(groups), shown, left_out, warnings, code_of)

    async def _rows(self, request: StartRequest, wait_s: float) -> str:
        """The digest of the input file that the start names; "" without one, and where that cannot be known."""
        file = request.input_file
        return "" if file is None else await self._files.digest_within(file, wait_s)

    def _code_of(self, options: ReplayOptions, found: str) -> Run | None:
        if options.uses_code_of_today:
            return None
        run = self._buffer.get(found).run
        if not self._folders.has_code(run):
            hint = 'take the code of today: --code today, over HTTP "code": "today"'
            raise StartRefused(f"the copy of the code that {found} ran is gone", hint=hint, field="replay")
        return run


def _nothing_there(recorded: RecordedRun, found: str) -> NotRecorded:
    if recorded.state in WORKING:
        reason, hint = "none of its groups has been read or has ended yet", "replay it later; or once it is read from"
    else:
        reason, hint = "it has no group", "start it again: there is nothing to be replayed"
    return NotRecorded(f"nothing of {found} can be replayed: {reason}", hint=hint, field="replay.source")


async def _warnings(source: Source, groups: Sequence[GroupRow], options: ReplayOptions, most: int | None) -> list[str]:
    """What of a recording may surprise a trainer: groups that are not replayed, and versions for ``max_staleness``."""
    found, left_out = list[str](), _left_out(source, groups)
    if left_out is not None:
        number, first = left_out["num_groups"], left_out["first"]
        found.append(f"{number} groups are in the recording without their samples; the first: {first}")
    if source.run.state in WORKING and options.mode == "only" and options.steps is None:
        found += _unfinished(source.run, len(groups), len(await source.groups()))
    versions = None if most is None else await weight_versions(source, groups)
    if versions is not None:
        found.append(
            f"max_staleness is {most}, and the recorded samples have weight versions {versions[0]} to {versions[1]}: "
            f"a group more than {most} behind the version that the trainer announces is stale. Announce the versions "
            "as they were recorded, or replay with max_staleness null"
        )
    return found


def _unfinished(run: RecordedRun, num_groups: int, num_opened: int) -> list[str]:
    """That ``num_groups`` of a run that was still running are replayed; nothing if these are all that it planned."""
    planned = run.num_groups_total
    num_rest = max(planned or 0, num_opened) - num_groups
    later = ", and all later ones" if planned is None else ""
    warning = (
        f"{run.run_id} had not ended: {num_groups} groups that were read or had ended are replayed. "
        f"Groups left out: {num_rest}{later}. For all groups, replay it after it has ended"
    )
    return [warning] if num_rest or planned is None else []


def _left_out(source: Source, groups: Sequence[GroupRow]) -> dict[str, Any] | None:
    """What of ``groups`` a file has without samples, as a run tells it."""
    reasons = source.left_out()
    missing = [group for group in groups if group.group_id in reasons]
    if not missing:
        return None
    first = missing[0]
    place = f"group {first.group_id} of instance {first.instance_id!r}, epoch {first.epoch}"
    return {"num_groups": len(missing), "first": f"{place}: {reasons[first.group_id]}"[:2_000]}


def _check_options(options: ReplayOptions) -> None:
    if options.is_file and options.code == "recorded":
        raise InvalidInput(
            "replay.code: the code of today judges what is replayed from a file",
            hint='leave it out, or "today"',
            field="replay.code",
        )


def _check_process(request: StartRequest) -> None:
    """Raise ``InvalidInput`` for what only a run with a process could do."""
    for name in sorted(OF_A_PROCESS if request.is_fed else ()):
        if request.payload.get(name) is not None:
            raise InvalidInput(f"{name} does nothing for a run that is only replayed", hint="leave it out", field=name)


def _check_own_affairs(taken: Mapping[str, Any]) -> None:
    """Raise ``InvalidInput`` that lists what a start has to name itself: the author of a file could get the prompts."""
    if names := sorted(name for name, value in taken.items() if is_own_affair(name, value)):
        raise InvalidInput(
            f"the file names addresses or keys, which are not taken over from it: {', '.join(names)}"[:2_000],
            hint="name each in the start (--engine-url URL, --set FIELD=VALUE), with null to do without",
            field=names[0],
        )


def _taken_over(
    recorded: RecordedRun, payload: Mapping[str, Any], origin: Origin, options: ReplayOptions
) -> dict[str, Any]:
    left_out = OF_ONE_START | payload.keys() | (frozenset() if options.needs_process else NOT_NEEDED)
    if options.is_file and options.mode == "only":  # what is only judged again asks no engine
        left_out |= {"remote_engine_url"}
    if GROUP_SIZE_NAMES & payload.keys():
        left_out |= GROUP_SIZE_NAMES
    taken = {name: value for name, value in recorded.payload.items() if name not in left_out}
    if recorded.origin != origin:
        # What neither says has other defaults here.
        taken.setdefault("reward_range", SLIME_REWARD_RANGE if recorded.origin == "slime" else None)
    return {"task_type": recorded.task_type, **taken}
