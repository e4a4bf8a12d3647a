"""Decides which run a start continues.

A list of finished ids belongs to a run of the same task type and group size that has reported every id in it. The run's
input file must have the same content as the start's. If several runs match, those of the same name come first, then the
one that has reported least beyond the list, then the one with the most similar start, then the newest.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from forebay.buffer.buffer import Buffer, LiveRun
from forebay.buffer.resume import check_bodies, covers, num_beyond
from forebay.core.errors import BodiesGone, InvalidInput
from forebay.core.group import GroupState
from forebay.core.run import WORKING, Run
from forebay.replay.options import ReplayOptions
from forebay.server.runs.input_files import InputFiles, num_bytes_of
from forebay.server.runs.start_checks import StartRequest

logger = logging.getLogger(__name__)


async def find_run(buffer: Buffer, files: InputFiles, request: StartRequest) -> LiveRun | None:
    """The run that a start continues; None for a new run, also if the groups that the trainer lost are not stored.

    A new run then generates those groups again. A trainer that keeps its deliveries has lost nothing. Raises
    ``RunNotFound``, ``InvalidInput`` or ``BodiesGone`` for a run that the payload or the stream's name selects.
    """
    # A list is compared with all ids that a run has reported; without a list, none are compared.
    async with AsyncExitStack() as held:
        for each in [entry for entry in buffer.entries if request.listed and _is_alike(entry.run, request)]:
            await held.enter_async_context(each.buffer.gone.everything())
        entry = await _find_resumable(buffer, files, request)
    if entry is None or request.keeps_deliveries:
        return entry
    try:
        await check_bodies(entry.buffer, request.listed)
    except BodiesGone as gone:
        if _named_by(buffer, request) is not None:
            raise
        logger.warning("run %s cannot be resumed; a new run starts: %s", entry.run.run_id, gone)
        return None
    return entry


async def _find_resumable(buffer: Buffer, files: InputFiles, request: StartRequest) -> LiveRun | None:
    run_id = _named_by(buffer, request)
    if run_id is not None:
        return _named_run(buffer, run_id, request)
    if not request.listed or request.origin == "native":
        return None
    knowing = _that_know_the_list(buffer, request)
    # Read only now, however large the file: only a list needs it before the reply.
    digest = await files.digest(request.input_file) if knowing and request.input_file is not None else ""
    same = {entry.run.run_id for entry in knowing if await _had_content(files, entry.run, request, digest)}
    if knowing and not same:
        logger.warning(
            "run %s knows the listed ids, but had another input file than %s: a new run starts"
            " (to continue the old run, start with its run_id)",
            knowing[0].run.run_id,
            request.input_file,
        )
    # Other starts may have happened meanwhile: choose among the current runs.
    still = [entry for entry in _that_know_the_list(buffer, request) if entry.run.run_id in same]
    return min(still, key=lambda entry: _unlikeness(entry, request), default=None)


def _named_by(buffer: Buffer, request: StartRequest) -> str | None:
    """The id of the run that a start names in its payload or, as slime's client has no field for it, as its stream."""
    run_id = request.payload.get("run_id")
    if run_id is not None:
        return str(run_id)
    if request.origin == "native":  # its name never selects a run
        return None
    is_id = any(entry.run.run_id == request.name and entry.run.origin == "slime" for entry in buffer.entries)
    return request.name if is_id else None


def _named_run(buffer: Buffer, run_id: str, request: StartRequest) -> LiveRun:
    entry = buffer.get(run_id)
    if request.origin == "slime" and entry.run.origin == "native":
        raise InvalidInput(
            f"run {run_id} was started over /v1/runs, so slime routes cannot reach it",
            hint="continue it with POST /v1/runs and this run_id, and read it by its id; or leave run_id out",
            field="run_id",
        )
    if not _is_alike(entry.run, request):
        raise InvalidInput("the run has another task type or group size, or replays something else", field="run_id")
    if not covers(entry.buffer, request.listed):
        raise InvalidInput("skip_instance_ids lists ids that the run has not reported", field="skip_instance_ids")
    return entry


def _that_know_the_list(buffer: Buffer, request: StartRequest) -> list[LiveRun]:
    """Runs that have reported every listed id, newest first."""
    # Never a natively started run: its trainer reads it by id, and no name leads to it.
    streams = [entry for entry in reversed(buffer.entries) if entry.run.origin == "slime"]
    alike = [entry for entry in streams if _is_alike(entry.run, request)]
    free = [entry for entry in alike if entry.run.name == request.name or not _belongs_to_another(entry.run, request)]
    return [entry for entry in free if covers(entry.buffer, request.listed)]


def _is_alike(run: Run, request: StartRequest) -> bool:
    is_same_task = run.task_type == request.task_type and run.settings.group_size == request.settings.group_size
    return is_same_task and _is_fed_alike(run, request)


def _is_fed_alike(run: Run, request: StartRequest) -> bool:
    """Whether both replay the same source without a process, or neither does."""
    if not (run.is_fed and request.is_fed) or run.replay is None:
        return run.is_fed == request.is_fed
    return run.replay["source"] == request.source or _named_source(run.payload) == _named_source(request.payload)


def _named_source(payload: Mapping[str, Any]) -> str | None:
    """The source as the start names it. ``ReplayPlan.check_source`` reports a name that now means another run."""
    options = ReplayOptions.parse(payload.get("replay"))
    return None if options is None else options.source


def _belongs_to_another(run: Run, request: StartRequest) -> bool:
    """Whether a working run of another name knows the listed ids only because its own trainer listed them.

    Two streams that lost their data list the same ids; the second must not take over the first one's new run.
    """
    # Multisets: an id listed twice was finished in two epochs.
    return run.state in WORKING and Counter(request.listed) <= Counter(run.start.first_listed)


async def _had_content(files: InputFiles, run: Run, request: StartRequest, digest: str) -> bool:
    """Whether the run's input file had at its start the content of this start's file, with this ``digest``."""
    given = run.payload.get("input_file") or None
    if given is None or request.input_file is None:
        return given is request.input_file
    # The digest of a large file is not known at first.
    own = run.input_sha256 or await files.digest_at(given, run.input_fingerprint)
    if own:
        return own == digest
    # It was changed or rewritten, and its old content is unknown: only path and size can be compared.
    size = await files.num_bytes(request.input_file)
    return given == request.input_file and size is not None and size == num_bytes_of(run.input_fingerprint)


def _unlikeness(entry: LiveRun, request: StartRequest) -> tuple[bool, int, int]:
    """Sort key of dissimilarity; among equals the first is used, which is the newest."""
    ours, theirs = request.payload, entry.run.payload
    fields = (ours.keys() | theirs.keys()) - {"skip_instance_ids"}
    num_changes = sum(ours.get(field) != theirs.get(field) for field in fields)
    return entry.run.name != request.name, num_beyond(entry.buffer, request.listed), num_changes


def what_is_left(buffer: Buffer, run: Run) -> str | None:
    """A message to the client of a new run without a list, if the run before it still has groups ready.

    A trainer that died before it saved anything starts like one that begins from scratch, so the two look the same.
    """
    if run.origin == "native" or run.start.first_listed or run.num_starts > 1:
        return None
    before = _started_before(buffer, run)
    if before is None:
        return None
    groups = before.buffer.groups
    # Full groups are judged at the next read.
    num_ready = groups.states[GroupState.READY] + groups.num_full
    num_delivered = groups.states[GroupState.LEASED] + groups.states[GroupState.ACKED]
    if not num_ready:
        return None
    new, old = run.run_id, before.run.run_id
    return (
        f"run {old} was started alike and still has {num_ready} groups ready, and {num_delivered} delivered;"
        f" run {new} generates its own. To continue run {old} from its first group, stop run {new} and start the"
        f" trainer again with /s/{old} appended to the server's address"
    )


def _started_before(buffer: Buffer, run: Run) -> LiveRun | None:
    """The newest other run of the same name, task type, group size and input."""
    for entry in reversed(buffer.entries):
        other = entry.run
        is_other = other.run_id != run.run_id and (other.name, other.origin) == (run.name, "slime")
        if is_other and _has_same_task(other, run):
            return entry
    return None


def _has_same_task(one: Run, other: Run) -> bool:
    if (one.task_type, one.settings.group_size) != (other.task_type, other.settings.group_size):
        return False
    digests = (one.input_sha256, other.input_sha256)
    return (
        digests[0] == digests[1] if all(digests) else one.payload.get("input_file") == other.payload.get("input_file")
    )
