"""Rows that occur only in a recording file: its run, calls of an engine, and its end."""

from typing import Annotated, Any

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.records.rows import BatchRow, ColumnsRow, GroupRow

Short = Annotated[str, msgspec.Meta(max_length=64)]
"""Text in a recorded run, limited to the length that Forebay writes."""
Size = Annotated[int, msgspec.Meta(ge=0)]


class RecordedRun(msgspec.Struct, tag="recorded_run", kw_only=True, frozen=True):
    """A run's start and its state when it was recorded. Without keys and credentials."""

    run_id: Short
    name: Short
    task_type: str
    origin: str
    """``slime`` or ``native``; determines the defaults of fields missing from ``payload``."""
    state: str
    reason: str
    created_at_s: float
    """Wall-clock seconds since the Unix epoch."""
    payload: dict[str, Any]
    """Start payload without ``skip_instance_ids`` and secrets."""
    generator_sha256: Short
    generator_hooks: list[str]
    """Hooks implemented by its generator file."""
    generator_contract: str | None
    """The slime contract that the file declares."""
    input_sha256: Short
    """SHA-256 in hex of its input file; "" if unknown."""
    weight_version: int | None
    """Version last announced by its trainer."""
    generator_files: dict[Annotated[str, msgspec.Meta(max_length=255)], Short] = {}
    """SHA-256 by name of the files that ``generator_sha256`` covers; empty if unknown."""
    num_groups_total: int | None = None
    """Number of groups that the run planned; None if unknown."""


class CallRow(msgspec.Struct, tag="call", kw_only=True, frozen=True):
    """A call of an engine. Its body is the request's body followed by the reply's."""

    seq: Size
    """Position in the order in which calls were made."""
    began_s: float
    """Unix time in seconds at which it was made."""
    method: str
    path: str
    request_bytes: Size
    """Length of the request's body."""
    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    content_type: Annotated[str, msgspec.Meta(pattern=r"^[\t -~\u0080-\u00ff]*\Z")]
    parts: list[tuple[Size, Annotated[float, msgspec.Meta(ge=0)]]]
    """Lengths of the reply's parts, and their times in seconds since the request."""
    is_whole: bool
    """False if the client left, or the engine died, before the reply's end."""


class LeftOutGroup(msgspec.Struct, frozen=True):
    """A group whose samples are not in the file, because one of their bodies could not be read at the export."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    reason: str

    def __str__(self) -> str:
        return f"group {self.group_id} of instance {self.instance_id!r}, epoch {self.epoch}: {self.reason}"


class EndRow(msgspec.Struct, tag="end", kw_only=True):
    """The last row of a recorded run: how the file was made, and how much it contains."""

    by: str
    """``forebay`` and its version."""
    at_s: float
    """Wall-clock seconds since the Unix epoch."""
    steps: str = ""
    """Steps whose groups are included; "" for all."""
    num_groups: int = 0
    num_samples: int = 0
    num_batches: int = 0
    num_bytes: int = 0
    """Total bytes of all bodies before compression."""
    left_out: list[LeftOutGroup] = []
    failure: str = ""
    """Why the rest of the run could not be exported."""
    failure_hint: str = ""


FileRow = RecordedRun | ColumnsRow | GroupRow | BatchRow | EndRow | CallRow
"""Rows in the records of a file."""
