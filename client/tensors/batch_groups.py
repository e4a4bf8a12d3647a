"""The groups of a batch by slot, with the arrays of each row: what adapters of trainers convert."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from forebay.client.model import Batch, Row
from forebay.client.tensors.ragged import Ragged
from forebay.core.parts import numpy_module
from forebay.core.sample import OWN_NAMES, fork_number
from forebay.core.sample import rollout_id as id_of_rollout

if TYPE_CHECKING:
    import numpy

COLUMNS = ("tokens", "loss_mask", "logprobs", "response_length", "has_logprobs", "offsets", "group_index")


@dataclass(frozen=True, slots=True)
class RowArrays:
    """The arrays of a sample, all of one length, and the length of its response if it states one."""

    ids: "numpy.ndarray[Any, Any]"
    loss_mask: "numpy.ndarray[Any, Any]"
    logprobs: "numpy.ndarray[Any, Any]"
    response_length: int
    """-1 if the sample does not state it."""

    @property
    def is_scored(self) -> bool:
        """Whether there are tokens, and every token to train on has a logprob."""
        return len(self.ids) > 1 and not numpy_module().isnan(self.logprobs[self.loss_mask.astype(bool)]).any()


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A row of a batch with its arrays."""

    row: Row
    arrays: RowArrays


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """A group without the copies that a hook put into its failed slots."""

    group_id: str
    slots: list[list[SlotRow]]
    """The main sample of each rollout, followed by its forks."""

    @property
    def instance_id(self) -> object:
        """Id of the task row."""
        return self.slots[0][0].row["instance_id"]


def groups_by_slot(batch: Batch) -> list[SlotGroup]:
    """The groups of a batch that have rows."""
    rows, arrays = rows_of_batch(batch), arrays_of_batch(batch)[0]
    groups = []
    for number, (start, end) in enumerate(pairwise(accumulate(batch.group_sizes, initial=0))):
        if start < end:
            slots = slots_of(rows, without_copies(rows, range(start, end)))
            made = [[SlotRow(rows[at], arrays[at]) for at in slot] for slot in slots]
            groups.append(SlotGroup(batch.group_ids[number], made))
    return groups


def rows_of_batch(batch: Batch) -> list[Row]:
    """The rows of a batch, those of unregistered writers without fields that mean something else to Forebay."""
    return [own_names(row) if at in batch.foreign_rows else row for at, row in enumerate(batch.rows)]


def own_names(row: Row) -> Row:
    """The row of an unregistered writer, without fields that mean something else to Forebay. No such row failed."""
    return {name: value for name, value in row.items() if name not in OWN_NAMES and name != "status"}


def arrays_of_batch(batch: Batch) -> tuple[list[RowArrays], list[int]]:
    """The arrays of each row of a batch, and the number of each row's group. Raises ``MissingExtra`` without NumPy."""
    ragged = Ragged.of(batch)
    flat = {name: ragged.numpy(name) for name in COLUMNS}
    places = zip(flat["offsets"][:-1], flat["offsets"][1:], flat["response_length"], flat["has_logprobs"], strict=True)
    parts = []
    for start, end, length, has_logprobs in places:
        ids, mask, logprobs = (flat[name][start:end] for name in ("tokens", "loss_mask", "logprobs"))
        # As in `collate`: in a sample with logprobs, a token without one is not trained on.
        mask = mask * numpy_module().isfinite(logprobs) if has_logprobs else mask
        parts.append(RowArrays(ids, mask, logprobs, int(length)))
    return parts, flat["group_index"].tolist()


def without_copies(rows: Sequence[Row], places: Sequence[int]) -> list[int]:
    """The places of the first row of each sample."""
    return sorted({rows[at]["uid"]: at for at in reversed(places)}.values())


def slots_of(rows: Sequence[Row], places: Sequence[int]) -> list[list[int]]:
    """The places of a group's rows by slot, each main sample before its forks."""
    slots: list[list[int]] = []
    by_rollout: dict[str, list[int]] = {}
    for at in places:
        rollout_id = id_of_rollout(rows[at].get("rollout_id"))
        if fork_number(rows[at].get("fork")) and rollout_id in by_rollout:
            by_rollout[rollout_id].append(at)
        else:  # a main sample, or the first fork of a rollout whose main sample a hook removed
            slots.append([at])
            by_rollout.setdefault(rollout_id, slots[-1])
    return slots
