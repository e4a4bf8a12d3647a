"""Which batches were handed out, which checkpoint holds them, and what a rewind undoes. Pure: time is an argument.

Batches that only a rewind or a resume can still change are evicted from memory, oldest first; the store keeps them
(``evicted_rows.py``). Leased batches and those that may still be acknowledged stay. A run that uses checkpoints also
keeps the batches of its last checkpoint and, for the next one, those that no checkpoint holds.
"""

import secrets
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import NamedTuple

from forebay.core.errors import BatchNotFound, CheckpointConflict, CheckpointNotFound
from forebay.core.group import BatchState
from forebay.core.records.rows import BatchRow, CheckpointRow

OUTSTANDING = frozenset({BatchState.LEASED, BatchState.ACKED, BatchState.EXPIRED})
"""States in which a trainer has used a batch, or may still report that it has."""
IN_MEMORY = frozenset({BatchState.LEASED, BatchState.EXPIRED})
"""States in which a batch is never evicted from memory."""
REMEMBERED_REQUESTS = 4_096
"""Number of recent request ids per run whose batch is known."""


class RewoundRows(NamedTuple):
    """The batches and checkpoints that a rewind undoes."""

    batches: list[BatchRow]
    checkpoints: list[CheckpointRow]


class Batches:
    """One run's checkpoints, and its batches that are in memory."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.by_id: dict[str, BatchRow] = {}
        self.is_complete = True
        """Whether all batches are in memory."""
        self._by_request: dict[str, str] = {}
        self._num_rows = 0
        """The rows of the batches in memory, plus one for each batch."""
        self._next_look = 0
        """Size of ``_num_rows`` at which eviction is considered again."""
        self.uses_checkpoints = False
        """Whether there has ever been a checkpoint."""
        self._checkpoints: dict[int, CheckpointRow] = {}
        self.last_number = 0

    def restore(self, checkpoints: Iterable[CheckpointRow]) -> None:
        """Load the stored checkpoints. Batches are added afterwards, ordered by number."""
        rows = list(checkpoints)
        self.uses_checkpoints = bool(rows)
        self._checkpoints = {row.step: row for row in rows if not row.is_forgotten}

    # --- batches

    def new_id(self) -> tuple[int, str]:
        """Return the number and the id of the next batch."""
        self.last_number += 1
        # The number gives the order; the random part makes ids of a lost journal unique.
        return self.last_number, f"batch-{self.last_number:06d}-{secrets.token_hex(4)}"

    def add(self, row: BatchRow) -> None:
        """Add a batch that was handed out."""
        self.recall(row)
        self.last_number = max(self.last_number, row.number)
        if row.request_id:
            # A reused request id means its newest batch, and is as recent as that batch.
            self._by_request.pop(row.request_id, None)
            self._by_request[row.request_id] = row.batch_id
            if len(self._by_request) > REMEMBERED_REQUESTS:
                del self._by_request[next(iter(self._by_request))]

    def recall(self, row: BatchRow) -> None:
        """Load a stored batch into memory again; one that is in memory is unchanged."""
        if row.batch_id in self.by_id:
            return
        self.by_id[row.batch_id] = row
        self._num_rows += _size(row)

    def forget_oldest(self, limit: int) -> None:
        """Evict the oldest evictable batches until the evictable ones have at most ``limit`` rows."""
        if self._num_rows < self._next_look:
            return
        last = max(self._checkpoints, default=0)
        may_go = [row for row in self._in_order() if self._may_go(row, last)]
        excess = sum(map(_size, may_go)) - limit
        for row in may_go:
            if excess <= 0:
                break
            excess -= _size(row)
            del self.by_id[row.batch_id]
            self.is_complete = False
        self._num_rows = sum(map(_size, self.by_id.values()))
        # Not again soon: many batches may have to stay.
        self._next_look = self._num_rows + max(limit, self._num_rows) // 8

    def _may_go(self, row: BatchRow, last_step: int) -> bool:
        if row.state is not BatchState.ACKED:
            return row.state not in IN_MEMORY
        return not self.uses_checkpoints or (row.checkpoint_step is not None and row.checkpoint_step < last_step)

    def _in_order(self) -> list[BatchRow]:
        # Recalled batches are behind newer ones in the dictionary.
        return sorted(self.by_id.values(), key=attrgetter("number"))

    def get(self, batch_id: str) -> BatchRow:
        """The batch with this id, which must be in memory. Raises ``BatchNotFound`` otherwise."""
        row = self.by_id.get(batch_id)
        if row is None:
            raise BatchNotFound(self.run_id, batch_id)
        return row

    def is_over(self, batch_id: str) -> bool:
        """Whether only a rewind can still change the batch, or it is not in memory."""
        row = self.by_id.get(batch_id)
        return row is None or row.state is BatchState.ACKED

    def of_request(self, request_id: str) -> str | None:
        """The id of the newest batch handed out for a reader's request, if the request is among the last ones."""
        return self._by_request.get(request_id)

    def in_state(self, *states: BatchState) -> list[BatchRow]:
        """Batches in memory in any of ``states``, oldest first."""
        return [row for row in self._in_order() if row.state in states]

    # --- checkpoints

    @property
    def checkpoints(self) -> list[CheckpointRow]:
        """All checkpoints that no rewind has undone, by step."""
        return [self._checkpoints[step] for step in self.steps]

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending."""
        return sorted(self._checkpoints)

    def in_checkpoint(self, step: int | None) -> list[BatchRow]:
        """Acknowledged batches in memory that the checkpoint of ``step`` holds; for None, those in no checkpoint."""
        return [row for row in self.in_state(BatchState.ACKED) if row.checkpoint_step == step]

    def has_at_hand(self, step: int) -> bool:
        """Whether memory has all batches in no checkpoint and all in the one of ``step``."""
        return self.is_complete or (self.uses_checkpoints and step >= max(self._checkpoints, default=0))

    def check_fixable(self, rows: Iterable[BatchRow], step: int) -> None:
        """Raise ``CheckpointConflict`` unless each batch can be fixed to ``step``, or already is."""
        last = max(self._checkpoints, default=step)
        for row in rows:
            if row.checkpoint_step not in (None, step):
                raise CheckpointConflict(
                    f"batch {row.batch_id!r} is fixed to the checkpoint of step {row.checkpoint_step}, not {step}",
                    hint="name only batches that no earlier checkpoint holds",
                )
            if row.checkpoint_step is None and step < last:
                raise CheckpointConflict(
                    f"step {step} is below the last checkpoint, of step {last}",
                    hint=f"rewind to a checkpoint below {step} first, or use a higher step",
                )

    def fix(self, rows: Iterable[BatchRow], step: int, at_s: float, weight_version: int | None) -> CheckpointRow:
        """Assign these batches to the checkpoint of ``step``; its time and version are those of its first report."""
        for row in rows:
            row.checkpoint_step = step
        self.uses_checkpoints = True
        self._next_look = 0  # batches of the previous checkpoint may be evicted now
        made = CheckpointRow(run_id=self.run_id, step=step, at_s=at_s, weight_version=weight_version)
        # A checkpoint may be reported repeatedly, with more batches.
        return self._checkpoints.setdefault(step, made)

    def weight_version(self, step: int | None) -> int | None:
        """The weight version announced at the checkpoint of ``step``; None if unknown."""
        return None if step is None else self._checkpoints[step].weight_version

    # --- rewinding

    def after(self, step: int | None) -> RewoundRows:
        """The batches and checkpoints after the checkpoint of ``step``; all of them for None.

        Raises ``CheckpointNotFound``.
        """
        if step is not None and step not in self._checkpoints:
            raise CheckpointNotFound(self.run_id, step, self.steps)
        batches = [row for row in self.in_state(*OUTSTANDING) if not _is_within(row.checkpoint_step, step)]
        return RewoundRows(batches, [row for row in self.checkpoints if not _is_within(row.step, step)])

    def undo(self, undone: RewoundRows, reason: str) -> None:
        """Revoke these batches and forget these checkpoints."""
        for row in undone.batches:
            row.state, row.reason, row.checkpoint_step = BatchState.REVOKED, reason, None
        for checkpoint in undone.checkpoints:
            checkpoint.is_forgotten = True
            # The step may be reached and reported again after the rewind.
            del self._checkpoints[checkpoint.step]

    def follow_resume(self, taken: Collection[str], reason: str) -> list[BatchRow]:
        """Apply a resume: groups in ``taken`` are ready again, all others acknowledged. Returns the changed batches."""
        changed = []
        for row in self.in_state(*OUTSTANDING):
            is_late = row.state is BatchState.EXPIRED  # its groups are ready, or in another batch
            kept = [] if is_late else [key for key in row.group_ids if key not in taken]
            if row.state is BatchState.ACKED and len(kept) == len(row.group_ids):
                continue
            if kept:
                row.state, row.group_ids = BatchState.ACKED, kept
            else:
                row.reason = "its lease expired, and its trainer resumed" if is_late else reason
                row.state, row.checkpoint_step = BatchState.REVOKED, None
            changed.append(row)
        return changed

    def add_acked(self, group_ids: list[str], reported_ids: list[str], num_rows: int, at_s: float) -> BatchRow:
        """Make a batch of the groups in revoked replies that the trainer listed as finished."""
        number, batch_id = self.new_id()
        row = BatchRow(
            run_id=self.run_id,
            batch_id=batch_id,
            number=number,
            state=BatchState.ACKED,
            group_ids=group_ids,
            reported_ids=reported_ids,
            num_rows=num_rows,
            leased_at_s=at_s,
            is_self_acking=True,
        )
        self.add(row)
        return row


def _size(row: BatchRow) -> int:
    return 1 + row.num_rows


def _is_within(step: int | None, bound: int | None) -> bool:
    return step is not None and bound is not None and step <= bound
