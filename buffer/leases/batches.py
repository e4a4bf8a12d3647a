"""Which batches were handed out, which checkpoint holds them, and what a rewind undoes. Pure: time is an argument."""

import secrets
from collections.abc import Collection, Iterable
from typing import NamedTuple

from forebay.buffer.store.rows import BatchRow, CheckpointRow
from forebay.core.errors import BatchNotFound, CheckpointConflict, CheckpointNotFound
from forebay.core.group import BatchState

OUTSTANDING = frozenset({BatchState.LEASED, BatchState.ACKED, BatchState.EXPIRED})
"""The states in which a trainer has used a batch, or may still say that it has."""


class Undone(NamedTuple):
    """What a rewind takes back."""

    batches: list[BatchRow]
    checkpoints: list[CheckpointRow]


class Batches:
    """The batches and checkpoints of one run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.by_id: dict[str, BatchRow] = {}
        self._by_request: dict[str, BatchRow] = {}
        self.uses_checkpoints = False
        """Whether there ever was a checkpoint."""
        self._checkpoints: dict[int, CheckpointRow] = {}
        self._last_number = 0

    def restore(self, batches: Iterable[BatchRow], checkpoints: Iterable[CheckpointRow]) -> None:
        """Take over what is stored, batches in the order of their numbers."""
        for row in batches:
            self.add(row)
        rows = list(checkpoints)
        self.uses_checkpoints = bool(rows)
        self._checkpoints = {row.step: row for row in rows if not row.is_forgotten}

    # --- batches

    def new_id(self) -> tuple[int, str]:
        """The number and the id of the next batch."""
        self._last_number += 1
        # The number gives the order; the rest keeps ids of a lost journal from coming again.
        return self._last_number, f"batch-{self._last_number:06d}-{secrets.token_hex(4)}"

    def add(self, row: BatchRow) -> None:
        """Take in a batch that was handed out."""
        self.by_id[row.batch_id] = row
        self._last_number = max(self._last_number, row.number)
        if row.request_id:
            # A request id that is used again means its newest batch.
            self._by_request[row.request_id] = row

    def get(self, batch_id: str) -> BatchRow:
        """The batch with this id. Raises ``BatchNotFound``."""
        row = self.by_id.get(batch_id)
        if row is None:
            raise BatchNotFound(self.run_id, batch_id)
        return row

    def of_request(self, request_id: str) -> BatchRow | None:
        """The newest batch that was handed out for a reader's request."""
        return self._by_request.get(request_id)

    def in_state(self, *states: BatchState) -> list[BatchRow]:
        """The batches in any of ``states``, oldest first."""
        return [row for row in self.by_id.values() if row.state in states]

    # --- checkpoints

    @property
    def checkpoints(self) -> list[CheckpointRow]:
        """Every checkpoint that no rewind went behind, by step."""
        return [self._checkpoints[step] for step in self.steps]

    @property
    def steps(self) -> list[int]:
        """Their steps, ascending."""
        return sorted(self._checkpoints)

    def in_checkpoint(self, step: int | None) -> list[BatchRow]:
        """The acknowledged batches that the checkpoint of ``step`` holds; for None those that none holds."""
        return [row for row in self.in_state(BatchState.ACKED) if row.checkpoint_step == step]

    def check_fixable(self, rows: Iterable[BatchRow], step: int) -> None:
        """Raise ``CheckpointConflict`` unless every batch can be fixed to ``step``, or is."""
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
        """Let the checkpoint of ``step`` hold these batches; time and version are those of its first report."""
        for row in rows:
            row.checkpoint_step = step
        self.uses_checkpoints = True
        made = CheckpointRow(run_id=self.run_id, step=step, at_s=at_s, weight_version=weight_version)
        # A checkpoint may be reported again, with more batches.
        return self._checkpoints.setdefault(step, made)

    def weight_version(self, step: int | None) -> int | None:
        """What the trainer had announced at the checkpoint of ``step``; None if that is not known."""
        return None if step is None else self._checkpoints[step].weight_version

    # --- taking back

    def after(self, step: int | None) -> Undone:
        """What was handed out, or reported, behind the checkpoint of ``step``; everything for None.

        Raises ``CheckpointNotFound``.
        """
        if step is not None and step not in self._checkpoints:
            raise CheckpointNotFound(self.run_id, step, self.steps)
        batches = [row for row in self.in_state(*OUTSTANDING) if not _is_within(row.checkpoint_step, step)]
        return Undone(batches, [row for row in self.checkpoints if not _is_within(row.step, step)])

    def undo(self, undone: Undone, reason: str) -> None:
        """Revoke these batches and forget these checkpoints."""
        for row in undone.batches:
            row.state, row.reason, row.checkpoint_step = BatchState.REVOKED, reason, None
        for checkpoint in undone.checkpoints:
            checkpoint.is_forgotten = True
            # The step may be reached, and reported, again on another path.
            del self._checkpoints[checkpoint.step]

    def follow_resume(self, taken: Collection[str], reason: str) -> list[BatchRow]:
        """Follow what a resume decided: groups ``taken`` are ready again, all others acknowledged; what changed."""
        changed = []
        for row in self.in_state(*OUTSTANDING):
            is_late = row.state is BatchState.EXPIRED  # its groups are ready, or another batch has them
            kept = [] if is_late else [key for key in row.group_ids if key not in taken]
            if row.state is BatchState.ACKED and len(kept) == len(row.group_ids):
                continue
            if kept:
                row.state, row.group_ids = BatchState.ACKED, kept
            else:
                row.reason = "its lease expired, and its trainer came back" if is_late else reason
                row.state, row.checkpoint_step = BatchState.REVOKED, None
            changed.append(row)
        return changed

    def add_acked(self, group_ids: list[str], reported_ids: list[str], num_rows: int, at_s: float) -> BatchRow:
        """A batch of what a trainer got by replies that were taken back, as its list of finished ids says."""
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


def _is_within(step: int | None, bound: int | None) -> bool:
    return step is not None and bound is not None and step <= bound
