"""Samples as the index keeps them: those of one group that came together are one row, with one JSON text.

A row for each, in trees ordered by uid and by group, costs the writer several times as much.
"""

from collections.abc import Iterable, Sequence

import msgspec

from forebay.buffer.store.rows import ColumnsRow, Location, SampleRow, StoredSample, from_columns

FIELDS = SampleRow.__struct_fields__
"""What each sample's list in the text begins with; the segment, offset and length of its body follow."""

SCHEMA = (
    # ``segment`` holds the bodies, ``written_in`` the record that tells of them: another one for a ``ColumnsRow``.
    "CREATE TABLE samples (seq INTEGER PRIMARY KEY, run_id TEXT, group_id TEXT, segment INTEGER, written_in INTEGER,"
    f" num_bytes INTEGER, newest_at_s REAL, rows TEXT) /* {', '.join(FIELDS)} */",
    "CREATE INDEX samples_by_group ON samples (run_id, group_id)",
    # In order of arrival, so that it grows at its end, which costs next to nothing.
    "CREATE INDEX samples_by_segment ON samples (segment)",
    "CREATE INDEX columns_by_segment ON samples (written_in) WHERE written_in <> segment",
)

DELETE = "DELETE FROM samples INDEXED BY samples_by_group WHERE run_id = ? AND group_id = ? AND segment = ?"
"""Takes a run, a group and a segment."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def insert(num_rows: int) -> str:
    """The INSERT of so many rows, each as ``to_values`` makes it."""
    columns = "run_id, group_id, segment, written_in, num_bytes, newest_at_s, rows"
    return f"INSERT INTO samples ({columns}) VALUES {', '.join(['(?, ?, ?, ?, ?, ?, ?)'] * num_rows)}"  # noqa: S608


def to_values(key: tuple[str, str, int], samples: Sequence[tuple[SampleRow, Location]]) -> list[object]:
    """The values of a row of new ``samples``, whose key is their run, their group and their segment."""
    num_bytes = sum(location.length for _, location in samples)
    newest_at_s = max(row.received_at_s for row, _ in samples)
    return [*key, key[2], num_bytes, newest_at_s, _pack(samples)]


def columns_to_values(row: ColumnsRow, segment: int) -> list[object]:
    """The same for samples whose columns were written again, in ``segment``."""
    samples = [(sample.row, sample.location) for sample in from_columns(row)]
    values = to_values((row.run_id, row.group_id, row.segment), samples)
    values[3] = segment
    return values


def _pack(samples: Iterable[tuple[SampleRow, Location]]) -> str:
    values = [(*msgspec.structs.astuple(row), *msgspec.structs.astuple(location)) for row, location in samples]
    return _encode(values).decode()


def unpack(texts: Iterable[str]) -> list[StoredSample]:
    """The samples in ``texts`` in the order in which they came; of the same uid only the last."""
    found: dict[str, StoredSample] = {}
    for text in texts:
        for values in _decode(text):
            row = SampleRow(**dict(zip(FIELDS, values, strict=False)))
            found[row.uid] = StoredSample(row, Location(*values[len(FIELDS) :]))
    return sorted(found.values(), key=_arrival)


def _arrival(sample: StoredSample) -> tuple[float, int, int]:
    # The time comes first: a body that was moved lies behind those of later samples.
    return (sample.row.at_s, sample.location.segment, sample.location.offset)


def uids(texts: Iterable[str]) -> set[str]:
    """The uids in ``texts``."""
    place = FIELDS.index("uid")
    return {values[place] for text in texts for values in _decode(text)}
