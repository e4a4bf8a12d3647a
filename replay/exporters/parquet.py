"""Parquet: one row per sample, for ``datasets``, DuckDB and pandas."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.files import opener
from forebay.core.lazy_names import require_extra
from forebay.core.outcome import reward_parts_of
from forebay.replay.exporters.exporter import WriteRollout
from forebay.replay.exporters.rollouts import ExportedRollout, Json, RolloutSample
from forebay.replay.recording import Recording

require_extra("export", "pyarrow")

import pyarrow as pa  # noqa: E402 - after the check
import pyarrow.parquet as pq  # noqa: E402

FLUSH_BYTES = 32 << 20
"""Bytes of bodies after which a row group is written."""

_CALL = {"id": pa.string(), "type": pa.string(), "function": pa.struct({"name": pa.string(), "arguments": pa.string()})}
_TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id")
_MESSAGE = dict.fromkeys(_TEXTS, pa.string()) | {"tool_calls": pa.list_(pa.struct(_CALL))}
_NUMBERS = {"epoch": pa.int64(), "step": pa.int64(), "slot": pa.int32(), "fork": pa.int32()}
_IDS = ("run_id", "group_id", "instance_id", "uid", "rollout_id")
_PARTS = pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()}))  # `datasets` cannot read a map
_ENDING = ("outcome", "error", "became", "group_state", "group_reason")
_RECORDED = (
    dict.fromkeys(_IDS, pa.string())
    | _NUMBERS
    | {"reward": pa.float64(), "reward_parts": _PARTS, "received_at_s": pa.float64()}
    | dict.fromkeys(_ENDING, pa.string())
)
_ARRAYS = {"tokens": pa.int32(), "logprobs": pa.float32(), "loss_mask": pa.uint8()}
_LISTS = {"messages": pa.list_(pa.struct(_MESSAGE)), **{name: pa.list_(kind) for name, kind in _ARRAYS.items()}}
SCHEMA = pa.schema(_RECORDED | _LISTS | {"extra": pa.string()})


@contextmanager
def parquet(path: Path, recording: Recording) -> Iterator[WriteRollout]:  # noqa: ARG001 - as every exporter
    """Write a row per sample.

    ``logprobs`` and ``loss_mask`` are as long as ``tokens``; null where the sample has none. ``extra`` is JSON: all
    other fields of the body, and ``messages`` as written if their columns cannot hold them.
    """
    waiting: list[tuple[ExportedRollout, RolloutSample]] = []
    num_bytes = 0
    with open(path, "xb", opener=opener) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as table:

        def flush() -> None:
            if waiting:
                table.write_batch(_batch(waiting))
            waiting.clear()

        def write(rollout: ExportedRollout) -> None:
            nonlocal num_bytes
            waiting.extend((rollout, sample) for sample in rollout.samples)
            num_bytes += sum(len(sample.body) for sample in rollout.samples)
            if num_bytes >= FLUSH_BYTES:
                flush()
                num_bytes = 0

        yield write
        flush()


def _batch(rows: Sequence[tuple[ExportedRollout, RolloutSample]]) -> Any:
    samples = [sample for _, sample in rows]
    messages = [_fitting(sample.fields["messages"], _LISTS["messages"]) for sample in samples]
    flat = [
        rollout.recorded(each) | {"reward_parts": reward_parts_of(each.fields) or None, "messages": found}
        for (rollout, each), found in zip(rows, messages, strict=True)
    ]
    extra = [_extra(sample.fields, row) for sample, row in zip(samples, flat, strict=True)]
    for row in flat:
        row["instance_id"] = str(row["instance_id"])
        row["reward_parts"] = row["reward_parts"] and [{"name": n, "value": v} for n, v in row["reward_parts"].items()]
    columns = [pa.array([row[name] for row in flat], SCHEMA.field(name).type) for name in (*_RECORDED, "messages")]
    columns += [_lists([_array(sample, name) for sample in samples], kind) for name, kind in _ARRAYS.items()]
    return pa.RecordBatch.from_arrays([*columns, pa.array(extra, pa.string())], schema=SCHEMA)


def _array(sample: RolloutSample, name: str) -> bytes | None:
    """An array of a sample as bytes; None if it has none."""
    arrays = sample.arrays
    if not arrays.num_tokens or (name == "logprobs" and not arrays.has_logprobs):
        return None
    return bytes(arrays.tokens) if name == "tokens" else b"".join(getattr(arrays, name))


def _lists(arrays: Sequence[bytes | None], kind: Any) -> Any:
    """A column of lists, without an object for each number."""
    content = b"".join(array or b"" for array in arrays)
    size = kind.bit_width // 8
    offsets = pa.array(accumulate((len(array or b"") // size for array in arrays), initial=0), pa.int32())
    values = pa.Array.from_buffers(kind, len(content) // size, [None, pa.py_buffer(content)])
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array([array is None for array in arrays]))


def _fitting(value: Any, kind: Any) -> Any:
    """A JSON value in a column's type. Where it does not fit, it becomes JSON as text, or null."""
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {field.name: _fitting(value[field.name], field.type) for field in kind if field.name in value}
    if pa.types.is_list(kind) and isinstance(value, list):
        return [_fitting(each, kind.value_type) for each in value]
    if not pa.types.is_string(kind):
        return None
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _extra(fields: Json, columns: Json) -> str:
    """The fields of a body that no column has."""
    extra = {name: value for name, value in fields.items() if name not in columns or value != columns[name]}
    return msgspec.json.encode(extra).decode()
