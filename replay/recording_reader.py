"""Reading the file of a recording: its run, groups, samples, batches, bodies, as far as they are what was written."""

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from forebay.core.errors import MissingExtra
from forebay.core.ids import InstanceId
from forebay.replay.chosen_groups import chosen_groups
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.model import BatchRecord, GroupRecord, RunRecord, SampleRecord
from forebay.replay.options import parse_steps
from forebay.replay.recorded_sample import check_sample
from forebay.replay.recording_rows import Damage, RecordingRows
from forebay.replay.recording_schema import BATCHES, GROUPS, MAX_BODY_BYTES, META, SAMPLES, RecordingTable

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

MAX_WINDOW_BYTES = 1 << 27
"""Of a frame; more is asked for by none that ``zstd`` makes with its usual levels."""


class LeftOutGroup(msgspec.Struct, frozen=True):
    """A group that a file has without its samples: one of their bodies could not be read when it was exported."""

    group_id: str
    instance_id: InstanceId
    epoch: int
    reason: str

    def __str__(self) -> str:
        return f"group {self.group_id} of instance {self.instance_id!r}, epoch {self.epoch}: {self.reason}"


class RecordingMade(msgspec.Struct, kw_only=True):
    """How a file came about, and how much it has."""

    by: str
    """``forebay`` and its version."""
    at_s: float
    """Wall-clock seconds since the Unix epoch."""
    steps: str = ""
    """Only the groups of these steps; "" for all."""
    num_groups: int = 0
    last_group: int = 0
    """The highest number of a group."""
    num_samples: int = 0
    num_batches: int = 0
    last_batch: int = 0
    num_bytes: int = 0
    """Of all bodies, before they are compressed."""
    left_out: list[LeftOutGroup] = []


class Frames:
    """What zstandard frames hold, for any thread. Raises ``MissingExtra`` without that package."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise MissingExtra("zstandard", "zstd") from None
        self._zstandard = zstandard
        self._decompress = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompress
        # Two threads in one decompressor write over each other's work.
        self._lock = threading.Lock()

    def content(self, frame: object, num_bytes: int | None = None, *, most: int = MAX_BODY_BYTES) -> bytes:
        """What ``frame`` holds: ``num_bytes``, if that is known, and ``most`` of them. Raises ``ValueError``."""
        if not isinstance(frame, bytes):
            raise ValueError("it is no blob")
        try:
            head = self._zstandard.get_frame_parameters(frame)
            # Before there is room for it: what is damaged may name any size.
            if not head.has_checksum or (num_bytes is not None and head.content_size != num_bytes):
                raise ValueError("it is no frame of this length with a checksum")
            if head.content_size > most:
                raise ValueError(f"it is to hold {head.content_size:,} bytes: more than {most:,} are never written")
            with self._lock:
                content: bytes = self._decompress(frame, allow_extra_data=False)
        except (self._zstandard.ZstdError, MemoryError) as error:
            raise ValueError(str(error)) from None
        return content


class RecordingReader:
    """A file that ``forebay recording export`` has written. It is never changed; several threads may read it.

    What is not what was written raises ``RecordingDamaged``, with its name, once it is asked for; everything else can
    be read. What a list lacks is in ``damage``.
    """

    def __init__(self, path: Path | str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Raises ``FileNotFoundError``; ``RecordingDamaged`` for a file of another kind or a newer format."""
        self.path = Path(path)
        self._max_body_bytes = max_body_bytes
        self.damage: list[Damage] = []
        """What ``groups``, ``batches`` and ``calls`` left out."""
        self.frames = Frames()
        self.tables = RecordingRows(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self.tables.close()

    @property
    def has_run(self) -> bool:
        """Whether it is of a run, not of an engine's calls alone. Raises ``RecordingDamaged``."""
        return bool(self.tables.ask("meta", "SELECT 1 FROM meta WHERE name = 'run'"))

    @cached_property
    def run(self) -> RunRecord:
        """What it is a recording of. Raises ``NotRecorded`` if it has an engine's calls alone."""
        return self._meta("run", RunRecord)

    @cached_property
    def made(self) -> RecordingMade:
        """How it came about. Raises as ``run`` does."""
        return self._meta("made", RecordingMade)

    @cached_property
    def left_out(self) -> dict[str, LeftOutGroup]:
        """By id, the groups that it has without their samples."""
        try:
            return {each.group_id: each for each in self.made.left_out}
        except RecordingDamaged:  # which is told of whatever else needs it
            return {}

    @property
    def num_calls(self) -> int:
        """How many calls of an engine it has."""
        return int(self.tables.ask("calls", "SELECT count(seq) FROM calls NOT INDEXED")[0][0])

    def groups(self, steps: str | Sequence[tuple[int, int]] | None = None) -> list[GroupRecord]:
        """Every group that can be read, in the order in which they opened.

        With ``steps``, as in ``"50-60,70"``, those of the batches of these steps, in the order in which they went out.
        Raises ``NotRecorded``, and ``InvalidInput`` for what names no steps.
        """
        groups = self._records(GROUPS, GroupRecord)
        if steps is None:
            return groups
        return chosen_groups(groups, self.batches(), parse_steps(steps) if isinstance(steps, str) else steps)

    def batches(self) -> list[BatchRecord]:
        """Every batch that can be read, by its number."""
        return self._records(BATCHES, BatchRecord)

    def samples(self, group_id: str) -> list[SampleRecord]:
        """Every sample that names the group, late and surplus ones too, in the order in which they came.

        Raises ``NotRecorded``; ``RecordingDamaged`` unless all of them can be read, and for a group in ``left_out``.
        """
        place, num_rows = f"group {group_id}", self._num_rows(group_id)
        if (left_out := self.left_out.get(group_id)) is not None:
            damage = Damage(place, f"its samples were left out when it was exported: {left_out.reason}")
            hint = "forebay recording show FILE lists such groups; export once more where its bodies are whole"
            raise self.tables.damaged(damage, hint=hint)
        try:
            rows = self.tables.find(SAMPLES, "group_id", group_id)
        except RecordingDamaged:
            rows = []
        if len(rows) != num_rows:  # the index may be damaged, and the rows be there
            rows = [row for seq in self._seqs.get(group_id, ()) for row in self.tables.find(SAMPLES, "seq", seq)]
        if len(rows) != num_rows:
            raise self.tables.damaged(Damage(place, f"{len(rows)} of its {num_rows} samples are there"))
        return [self.sample(row) for row in rows]

    def body(self, sample: SampleRecord) -> bytes:
        """The body of a sample, as it was stored. Raises ``RecordingDamaged``, also for one that no write takes."""
        _, seq, num_bytes = sample.place
        place = f"the body of sample {seq} ({sample.uid})"
        found = self.tables.ask(place, "SELECT body FROM samples WHERE seq = ?", seq)
        try:
            body = self.frames.content(found[0][0] if found else None, num_bytes, most=self._max_body_bytes)
            check_sample(sample, body)
        except ValueError as error:
            place += f" of group {self._numbers.get(sample.group_id)}"
            raise self.tables.damaged(Damage(place, str(error))) from None
        return body

    def sample(self, row: tuple[Any, ...]) -> SampleRecord:
        """The sample of a row of ``rows``. Raises ``RecordingDamaged``."""
        sample, values = self.tables.read(SAMPLES, row, SampleRecord)
        if not isinstance(values[5], int):
            raise self.tables.damaged(Damage(f"samples {values[0]}", "its num_bytes is not a number"))
        return msgspec.structs.replace(sample, place=(0, values[0], values[5]))

    def _num_rows(self, group_id: str) -> int:
        """How many samples name the group. Raises ``NotRecorded``, ``RecordingDamaged``."""
        try:
            found = self.tables.find(GROUPS, "group_id", group_id)
        except RecordingDamaged:
            found = []
        # By the table where the index says nothing: either may be damaged.
        number = None if found else self._numbers.get(group_id)
        found = found or ([] if number is None else self.tables.find(GROUPS, "number", number))
        if not found:
            raise NotRecorded(f"{self.path.name} has no group {group_id!r}", hint="groups() lists those that it has")
        return int(self.tables.read(GROUPS, found[0], GroupRecord)[1][2])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The key of every group, by the table alone."""
        return {group.group_id: group.number for group in self.groups()}

    @cached_property
    def _seqs(self) -> dict[str, list[int]]:
        """The keys of every group's samples, by the table alone."""
        found: dict[str, list[int]] = {}
        for row in self.tables.scan(SAMPLES, self.made.num_samples):
            if not isinstance(row, Damage):
                found.setdefault(row[1], []).append(row[0])
        return found

    def _records(self, table: RecordingTable, kind: type[RecordT]) -> list[RecordT]:
        found, bad = list[RecordT](), list[Damage]()
        num, last = self._extent(table, bad)
        for each in self.tables.scan(table, last):
            if isinstance(each, Damage):
                bad.append(each)
                continue
            try:
                found.append(self.tables.read(table, each, kind)[0])
            except RecordingDamaged as error:
                bad.append(Damage.of(error, table.name))
        if num not in (None, len(found)) and not bad:
            bad.append(Damage(table.name, f"{len(found)} of {num} rows are there"))
        self.damage += [each for each in bad if each not in self.damage]
        return found

    def _extent(self, table: RecordingTable, bad: list[Damage]) -> tuple[int | None, int]:
        """How many rows there are, if that is known, and the highest key."""
        try:
            made = self.made
        except RecordingDamaged as error:
            bad.append(Damage.of(error, "meta"))
            return None, self.tables.last(table)
        return (made.num_groups, made.last_group) if table is GROUPS else (made.num_batches, made.last_batch)

    def _meta(self, name: str, kind: type[RecordT]) -> RecordT:
        rows = self.tables.find(META, "name", name)
        if not rows:
            hint = "`forebay recording export RUN FILE` makes one of a run"
            raise NotRecorded(f"{self.path.name} has no run: an engine's calls alone, perhaps", hint=hint)
        return self.tables.read(META, rows[0], kind)[0]
