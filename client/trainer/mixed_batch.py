"""Batches of several runs as one."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import msgspec

from forebay.client.model import Batch, Row
from forebay.core.safetensors_format import ITEM_BYTES, blob_head, read_blob


@dataclass(frozen=True)
class MixedBatch(Batch):
    """Groups of several runs. Each row has the ``run_id`` of its run; ``meta_info`` has each run's, by name."""

    parts: Mapping[str, Batch] = field(default_factory=dict)
    """The batch of each run, by name. Its id, like those that ``batch_id`` joins with ``+``, begins with the run's."""


def mix(parts: Mapping[str, Batch], wait_s: float) -> MixedBatch:
    """Make one batch of those of several runs, which ``named`` returned, by the run's name."""
    batches = list(parts.values())
    rows = [row for batch in batches for row in batch.rows]
    starts = accumulate((len(batch.rows) for batch in batches), initial=0)
    return MixedBatch(
        batch_id="+".join(batch.batch_id for batch in batches),
        rows=rows,
        meta_info={name: batch.meta_info for name, batch in parts.items()},
        lease_s=batches[0].lease_s,
        group_sizes=[size for batch in batches for size in batch.group_sizes],
        step=batches[0].step,
        foreign_rows={start + at for start, batch in zip(starts, batches, strict=False) for at in batch.foreign_rows},
        content=_content(batches, rows) if batches[0].content else b"",
        group_ids=[key for batch in batches for key in batch.group_ids],
        wait_s=wait_s,
        parts=parts,
    )


def named(batch: Batch, run_id: str) -> Batch:
    """The batch with its run's id in each row, and in front of its own id."""
    return replace(batch, batch_id=f"{run_id}/{batch.batch_id}", rows=[{**row, "run_id": run_id} for row in batch.rows])


def _content(batches: Sequence[Batch], rows: Sequence[Row]) -> bytes:
    """The tensors of all batches, concatenated; tokens and groups are counted through."""
    views = [read_blob(batch.content) for batch in batches]
    pieces: dict[str, list[bytes | memoryview]] = {name: [view[name].data for view in views] for name in views[0]}
    counted = {
        "offsets": [view["tokens"].shape[0] for view in views],
        "group_index": [batch.num_groups for batch in batches],
    }
    for name, nums in counted.items():
        pieces[name] = [_shifted(*each) for each in zip(pieces[name], accumulate(nums, initial=0), strict=False)]
    # Each batch's offsets begin where those of the one before end.
    pieces["offsets"][1:] = [piece[8:] for piece in pieces["offsets"][1:]]
    pieces["rest"] = [msgspec.json.encode({"data": rows})]
    types = {name: tensor.dtype for name, tensor in views[0].items()}
    sizes: Any = [(name, types[name], (sum(map(len, pieces[name])) // ITEM_BYTES[types[name]],)) for name in types]
    return b"".join((blob_head(sizes, {"format": "forebay"}), *chain.from_iterable(pieces.values())))


def _shifted(numbers: bytes | memoryview, by: int) -> bytes:
    return array("q", [number + by for number in array("q", bytes(numbers))]).tobytes()
