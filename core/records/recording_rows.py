"""Rows that only a recording in a file has: of its run, of an engine's call, and of its end."""

from typing import Annotated, Any

import msgspec

from forebay.core.ids import InstanceId
from forebay.core.records.rows import BatchRow, ColumnsRow, GroupRow

Short = Annotated[str, msgspec.Meta(max_length=64)]
"""What is noted in a run: no longer than Forebay makes it."""
Size = Annotated[int, msgspec.Meta(ge=0)]


class RecordedRun(msgspec.Struct, tag="recorded_run", kw_only=True, frozen=True):
    """What a run was started with, and how it stood when it was recorded. Without keys and credentials."""

    run_id: Short
    name: Short
    task_type: str
    origin: str
    """``slime`` or ``native``: what its ``payload`` leaves out has other defaults."""
    state: str
    reason: str
    created_at_s: float
    """Wall-clock seconds since the Unix epoch."""
    payload: dict[str, Any]
    """What it was started with, but for ``skip_instance_ids`` and what is secret."""
    generator_sha256: Short
    generator_hooks: list[str]
    """The hooks that its generator file implements."""
    generator_contract: str | None
    """Which of slime's contracts the file declares."""
    input_sha256: Short
    """Of its input file's bytes, in hex; "" where that is not known."""
    weight_version: int | None
    """What its trainer last announced."""
    generator_files: dict[Annotated[str, msgspec.Meta(max_length=255)], Short] = {}
    """SHA-256 by name of the files that ``generator_sha256`` covers; none where it is not known."""
    num_groups_total: int | None = None
    """How many groups the run planned; None when unknown."""


class CallRow(msgspec.Struct, tag="call", kw_only=True, frozen=True):
    """A call of an engine. Its body has the request's, then that of the reply."""

    seq: Size
    """Place in the order in which calls were asked."""
    began_s: float
    """When it was asked: seconds since the Unix epoch."""
    method: str
    path: str
    request_bytes: Size
    """The length of the request's body."""
    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    content_type: Annotated[str, msgspec.Meta(pattern=r"^[\t -~\u0080-\u00ff]*\Z")]
    parts: list[tuple[Size, Annotated[float, msgspec.Meta(ge=0)]]]
    """The lengths of the reply's parts, and when each came: seconds since the request."""
    is_whole: bool
    """False where the client left, or the engine died, before the reply's end."""


class LeftOutGroup(msgspec.Struct, frozen=True):
    """A group that a file has without its samples: one of their bodies could not be read when it was exported."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    reason: str

    def __str__(self) -> str:
        return f"group {self.group_id} of instance {self.instance_id!r}, epoch {self.epoch}: {self.reason}"


class EndRow(msgspec.Struct, tag="end", kw_only=True):
    """The last row of a recorded run: how the file came about, and how much it has."""

    by: str
    """``forebay`` and its version."""
    at_s: float
    """Wall-clock seconds since the Unix epoch."""
    steps: str = ""
    """Only the groups of these steps; "" for all."""
    num_groups: int = 0
    num_samples: int = 0
    num_batches: int = 0
    num_bytes: int = 0
    """Of all bodies, before they are compressed."""
    left_out: list[LeftOutGroup] = []
    failure: str = ""
    """Why the rest of the run could not be exported."""
    failure_hint: str = ""


FileRow = RecordedRun | ColumnsRow | GroupRow | BatchRow | EndRow | CallRow
"""What the records of a file have."""
