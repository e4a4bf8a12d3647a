"""Samples as the index keeps them: those of one group that came together are one row, with one JSON text.

A row for each, in trees ordered by uid and by group, costs the writer several times as much.
"""

from collections.abc import Iterable

import msgspec

from forebay.buffer.store.rows import Location, SampleRow, StoredSample

FIELDS = SampleRow.__struct_fields__
"""What each sample's list in the text begins with; the segment, offset and length of its body follow."""

SCHEMA = (
    f"CREATE TABLE samples (seq INTEGER PRIMARY KEY, run_id TEXT, group_id TEXT, rows TEXT) /* {', '.join(FIELDS)} */",
    "CREATE INDEX samples_by_group ON samples (run_id, group_id)",
)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def insert(num_rows: int) -> str:
    """The INSERT of so many rows: run, group, and what ``pack`` makes."""
    return f"INSERT INTO samples (run_id, group_id, rows) VALUES {', '.join(['(?, ?, ?)'] * num_rows)}"  # noqa: S608


def pack(samples: Iterable[tuple[SampleRow, Location]]) -> str:
    """The text of ``samples``."""
    values = [(*msgspec.structs.astuple(row), *msgspec.structs.astuple(location)) for row, location in samples]
    return _encode(values).decode()


def unpack(texts: Iterable[str]) -> list[StoredSample]:
    """The samples in ``texts`` in the order in which they came; of the same uid only the last."""
    found: dict[str, StoredSample] = {}
    for text in texts:
        for values in _decode(text):
            row = SampleRow(**dict(zip(FIELDS, values, strict=False)))
            found[row.uid] = StoredSample(row, Location(*values[len(FIELDS) :]))
    return sorted(found.values(), key=lambda sample: (sample.location.segment, sample.location.offset))


def uids(texts: Iterable[str]) -> set[str]:
    """The uids in ``texts``."""
    place = FIELDS.index("uid")
    return {values[place] for text in texts for values in _decode(text)}
