"""Which run a start goes on with."""

import logging
from collections import Counter

from forebay.buffer.buffer import Buffer, Entry
from forebay.core.errors import BodiesGone, InvalidInput
from forebay.core.run import WORKING, Origin, Run
from forebay.server.runs.start_checks import StartRequest

logger = logging.getLogger(__name__)


async def find_run(buffer: Buffer, request: StartRequest, name: str, origin: Origin) -> Entry | None:
    """The run that a start goes on with; None for a new one, also if what the trainer lost is not stored any more.

    The new run then generates it once more. A trainer that keeps its deliveries has lost nothing. Raises
    ``RunNotFound``, ``InvalidInput`` or ``BodiesGone`` for a run that the payload names.
    """
    entry = find_resumable(buffer, request, name, origin)
    if entry is None or keeps_deliveries(request, origin):
        return entry
    try:
        await buffer.check_bodies(entry, request.listed)
    except BodiesGone as gone:
        if "run_id" in request.payload:
            raise
        logger.warning("run %s cannot be resumed, a new one starts: %s", entry.run.run_id, gone)
        return None
    return entry


def keeps_deliveries(request: StartRequest, origin: Origin) -> bool:
    """Whether batches stay with whoever has them: a native trainer without a list says itself what to undo."""
    return origin == "native" and not request.lists_ids


def find_resumable(buffer: Buffer, request: StartRequest, name: str, origin: Origin) -> Entry | None:
    """The run that the payload names, else the newest that knows every listed id; None for a new run.

    Raises ``RunNotFound`` or ``InvalidInput`` for a named run that cannot be gone on with.
    """
    run_id = request.payload.get("run_id")
    if run_id is not None:
        return _named_run(buffer, str(run_id), request)
    if not request.listed or origin == "native":
        return None
    # Never a run started natively: its trainer reads it by its id, and no name leads to it.
    streams = [entry for entry in reversed(buffer.entries) if entry.run.origin == "slime"]
    candidates = [entry for entry in streams if _is_alike(entry.run, request)]
    by_name = [entry for entry in candidates if entry.run.name == name]
    free = [entry for entry in candidates if not _belongs_to_another(entry.run, request)]
    by_task = [entry for entry in free if entry.run.payload.get("input_file") == request.input_file]
    return next((entry for entry in (*by_name, *by_task) if buffer.covers(entry, request.listed)), None)


def _named_run(buffer: Buffer, run_id: str, request: StartRequest) -> Entry:
    entry = buffer.get(run_id)
    if not _is_alike(entry.run, request):
        raise InvalidInput("the run has another task type or group size", field="run_id")
    if not buffer.covers(entry, request.listed):
        raise InvalidInput("skip_instance_ids lists ids that the run has not reported", field="skip_instance_ids")
    return entry


def _is_alike(run: Run, request: StartRequest) -> bool:
    return run.task_type == request.task_type and run.settings.group_size == request.settings.group_size


def _belongs_to_another(run: Run, request: StartRequest) -> bool:
    """Whether a working run of another name only knows the listed ids because its own trainer listed them at its start.

    Two streams that both lost their data list the same; the second must not take over the first one's new run.
    """
    # Multisets: an id that is listed twice was finished in two epochs.
    return run.state in WORKING and Counter(request.listed) <= Counter(run.start_skip)
