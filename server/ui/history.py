"""A run over its batches, for the page: reward, length, staleness and discards of each, and what is wrong now."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from forebay.buffer.buffer import LiveRun
from forebay.core.group import GroupState
from forebay.core.outcome import RewardTally
from forebay.core.records.rows import BatchRow, GroupRow, StoredSample
from forebay.server.engine_watch import silent_in
from forebay.server.findings import run_findings
from forebay.server.routes.groups import group_rows
from forebay.server.services import Services, services_of
from forebay.server.ui.overview import open_groups
from forebay.server.views import batch_view, run_summary

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["batches"])

MOST_KEPT = 4_096


class BatchFigures:
    """The figures of batches that were asked for, as a batch's samples never change; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    async def of(self, entry: LiveRun, batches: Sequence[BatchRow]) -> list[dict[str, Any]]:
        """The figures of each batch, in order. Raises ``StorageFailed``."""
        run_id, store = entry.run.run_id, entry.buffer.store
        keys = {row.batch_id: (run_id, row.batch_id) for row in batches}
        # Kept here as well: another request may forget them while this one waits for the store.
        found = {key: self._known[key] for key in keys.values() if key in self._known}
        missing = [row for row in batches if keys[row.batch_id] not in found]
        group_ids = [group_id for row in missing for group_id in row.group_ids]
        samples = await store.samples_of(run_id, group_ids) if group_ids else {}
        groups = await group_rows(entry, [*group_ids, *(group_id for row in missing for group_id in row.reported_ids)])
        found |= {keys[row.batch_id]: _figures(row, samples, groups) for row in missing}
        self._known |= found
        for key in list(self._known)[: max(0, len(self._known) - MOST_KEPT)]:
            del self._known[key]
        return [found[key] for key in keys.values()]


@router.get("/history")
async def history(
    run_id: str,
    request: Request,
    services: Server,
    after: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """The run with what is wrong, and up to ``limit`` batches after number ``after``, by default the newest."""
    entry = services.buffer.get(run_id)
    view, last = run_summary(entry), entry.buffer.batches.last_number
    after = max(0, last - limit) if after is None else after
    stored = await services.buffer.store.load_batches(run_id, after=after, limit=limit)
    rows = [entry.buffer.batches.by_id.get(row.batch_id, row) for row in stored]  # memory is ahead of the store
    engines = request.app.state.overview.engines.rows([entry.run])
    figures = await request.app.state.figures.of(entry, rows)
    return {
        "run": view,
        "findings": run_findings(entry, view, silent_in(engines)),
        "engines": engines,
        "open_groups": open_groups(entry),
        "last": last,
        "batches": [{**batch_view(row), "number": row.number, **each} for row, each in zip(rows, figures, strict=True)],
    }


def _figures(batch: BatchRow, samples: dict[str, list[StoredSample]], groups: dict[str, GroupRow]) -> dict[str, Any]:
    delivered = [(key, each) for key in batch.group_ids for each in samples[key] if each.row.is_rewarded]
    reported = [groups[key] for key in batch.reported_ids if key in groups]
    versions = [
        (group.weight_version, each.row.oldest_version) for key, each in delivered if (group := groups.get(key))
    ]
    return {
        "rewards": _spread(each.row.reward for _, each in delivered),
        "tokens": _spread(each.row.num_tokens or None for _, each in delivered),
        "bytes": _spread(each.location.length for _, each in delivered),
        "staleness": _spread(None if None in pair else pair[0] - pair[1] for pair in versions),  # type: ignore[operator]
        "discarded": Counter(row.reason for row in reported if row.state is GroupState.DISCARDED),
    }


def _spread(numbers: Iterable[float | None]) -> dict[str, float | None] | None:
    """``num``, ``mean``, ``min``, ``max`` of those that are known; None if none is."""
    tally = RewardTally()
    for number in numbers:
        if number is not None:
            tally.note(number)
    return tally.as_json() if tally.num else None
