"""Starts that replay a recording: which fields they take over, and whether they match what was recorded."""

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
from forebay.core.starts.evaluate import GROUP_SIZES
from forebay.core.starts.payload_text import check_texts
from forebay.generators.discovery.info import GeneratorInfo
from forebay.replay.conditions import (
    NOT_INHERITED,
    NOT_NEEDED,
    OF_A_PROCESS,
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

CODE = "generator_sha256"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A start's replay, after comparison with the recording."""

    options: ReplayOptions
    recorded: RecordedRun
    source: str
    """The run's id, or the file's path."""
    num_groups: int
    differences: list[dict[str, Any]]
    """Differences that are allowed, and are shown."""
    left_out: dict[str, Any] | None
    """Number of a file's groups without samples, and the ``first`` of them; None without any."""
    warnings: list[str]
    """Other facts about the recording that the caller should know before the replay."""
    code_of: Run | None
    """The run whose copy of the code is used; None for the current generator."""

    def note(self, run: Run, *, is_fed: bool) -> None:
        """Store in a run what it replays."""
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
        """Raise ``InvalidInput`` if ``run``, which this start continues, was fed from another source so far."""
        fed_from = run.replay["source"] if run.is_fed and run.replay is not None else self.source
        if fed_from != self.source:
            raise InvalidInput(
                f"run {run.run_id} replays {fed_from}, but {self.options.source!r} now means {self.source}",
                hint=f"set replay.source to {fed_from} to continue the run, or start a new one",
                field="replay.source",
            )

    @property
    def generator(self) -> GeneratorInfo | None:
        """The generator of the recorded code; None if the current code is used."""
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
            needs_input=run.payload.get("input_file") is not None,
            contract=run.generator_contract,
            files=run.generator_files,
            hooks=dict.fromkeys(run.generator_hooks, ""),
        )


def note_code(run: Run) -> None:
    """Warn of all differences from the recording, once the run's generator is known."""
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
    """The server's ``defaults`` that apply to a start with this ``payload``.

    Fields that a replay omits keep their recorded values. The defaults only decide how its process works, if any.
    """
    options = ReplayOptions.parse(payload.get("replay"))
    if options is None:
        return defaults
    return {name: each for name, each in defaults.items() if options.needs_process and not is_as_recorded(name)}


class ReplayStarts:
    """Completes and checks starts that replay a recording."""

    def __init__(self, buffer: Buffer, sources: ReplaySources, folders: RunFolders, files: InputFiles) -> None:
        self._buffer = buffer
        self._sources = sources
        self._folders = folders
        self._files = files

    async def completed(self, payload: dict[str, Any], origin: Origin) -> tuple[dict[str, Any], str]:
        """Fill a payload's missing fields from its recording; return it with the run or file that it replays.

        A payload that replays nothing is returned unchanged, with the source "". Raises ``InvalidInput``,
        ``RunNotFound``, ``NotRecorded``, ``InputRefused``.
        """
        # An explicit null counts as given: it replays nothing.
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
        """The start's replay; None without one. Within this context none of its data is removed; its run then keeps it.

        ``wait_s`` is the time limit for reading a large input file. Raises ``ReplayDiffers``, ``BodiesGone``,
        ``NotRecorded``, ``InvalidInput``, ``StartRefused``.
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
            if options.mode == "only":  # the other modes generate what is missing
                if not groups and not options.needs_process:
                    raise _nothing_there(recorded, found)
                await check_bodies(source, groups)
            left_out = _left_out(source, groups)
            warnings = await _warnings(source, groups, options, request.settings.max_staleness)
        shown = may_differ(recorded, request.payload, input_sha256=rows)
        code_of = self._code_of(options, found)
        return ReplayPlan(options, recorded, found, len(groups), shown, left_out, warnings, code_of)

    async def _rows(self, request: StartRequest, wait_s: float) -> str:
        """The digest of the start's input file; "" without one, or if it cannot be known."""
        file = request.input_file
        return "" if file is None else await self._files.digest_within(file, wait_s)

    def _code_of(self, options: ReplayOptions, found: str) -> Run | None:
        if options.uses_code_of_today:
            return None
        run = self._buffer.get(found).run
        if not self._folders.has_code(run):
            hint = 'use the current code: --code today, or "code": "today" over HTTP'
            raise StartRefused(f"the copy of the code that {found} ran was removed", hint=hint, field="replay")
        return run


def _nothing_there(recorded: RecordedRun, found: str) -> NotRecorded:
    if recorded.state in WORKING:
        reason, hint = "none of its groups has been read or has ended yet", "replay it once a group was read or ended"
    else:
        reason, hint = "it has no group", "start it without replay: there is nothing to replay"
    return NotRecorded(f"nothing of {found} can be replayed: {reason}", hint=hint, field="replay.source")


async def _warnings(source: Source, groups: Sequence[GroupRow], options: ReplayOptions, most: int | None) -> list[str]:
    """What may surprise a trainer: groups that are not replayed, and versions that exceed ``max_staleness``."""
    found, left_out = list[str](), _left_out(source, groups)
    if left_out is not None:
        number, first = left_out["num_groups"], left_out["first"]
        found.append(f"{number} groups of the recording have no samples; the first: {first}")
    if source.run.state in WORKING and options.mode == "only" and options.steps is None:
        found += _unfinished(source.run, len(groups), len(await source.groups()))
    versions = None if most is None else await weight_versions(source, groups)
    if versions is not None:
        found.append(
            f"max_staleness is {most}, and the recorded samples have weight versions {versions[0]} to {versions[1]}: "
            f"a group more than {most} behind the version that the trainer announces is stale. Announce the versions "
            "as recorded, or replay with max_staleness null"
        )
    return found


def _unfinished(run: RecordedRun, num_groups: int, num_opened: int) -> list[str]:
    """A warning that only ``num_groups`` of an unfinished run are replayed; none if these are all it planned."""
    planned = run.num_groups_total
    num_rest = max(planned or 0, num_opened) - num_groups
    later = ", and all later ones" if planned is None else ""
    warning = (
        f"{run.run_id} had not ended: {num_groups} groups that were read or had ended are replayed. "
        f"Groups left out: {num_rest}{later}. For all groups, replay it after it has ended"
    )
    return [warning] if num_rest or planned is None else []


def _left_out(source: Source, groups: Sequence[GroupRow]) -> dict[str, Any] | None:
    """Count of ``groups`` that a file has without samples, as a run shows it."""
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
            "replay.code: a replay from a file is always judged by the current code",
            hint='leave it out, or "today"',
            field="replay.code",
        )


def _check_process(request: StartRequest) -> None:
    """Raise ``InvalidInput`` for options that need a run process."""
    for name in sorted(OF_A_PROCESS if request.is_fed else ()):
        if request.payload.get(name) is not None:
            raise InvalidInput(f"{name} does nothing for a run that is only replayed", hint="leave it out", field=name)


def _check_own_affairs(taken: Mapping[str, Any]) -> None:
    """Raise ``InvalidInput`` with fields the start must name itself: a file's author could receive the prompts."""
    if names := sorted(name for name, value in taken.items() if is_own_affair(name, value)):
        raise InvalidInput(
            f"addresses and keys are not taken over from the file: {', '.join(names)}"[:2_000],
            hint="name each in the start (--engine-url URL, --set FIELD=VALUE), or null to omit it",
            field=names[0],
        )


def _taken_over(
    recorded: RecordedRun, payload: Mapping[str, Any], origin: Origin, options: ReplayOptions
) -> dict[str, Any]:
    left_out = NOT_INHERITED | payload.keys() | (frozenset() if options.needs_process else NOT_NEEDED)
    if options.is_file and options.mode == "only":  # a replay that only judges again calls no engine
        left_out |= {"remote_engine_url"}
    if GROUP_SIZES & payload.keys():
        left_out |= GROUP_SIZES
    taken = {name: value for name, value in recorded.payload.items() if name not in left_out}
    if recorded.origin != origin:
        # Fields that neither sets have other defaults here.
        taken.setdefault("reward_range", SLIME_REWARD_RANGE if recorded.origin == "slime" else None)
    return {"task_type": recorded.task_type, **taken}
