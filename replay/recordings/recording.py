"""A recording in a file: ``with Recording.open(path) as recording: …``. ``verify`` finds what of it is damaged."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from forebay.core.binary_sample import as_json
from forebay.core.errors import ForebayError
from forebay.replay.engine.call_frames import COLUMNS, CallReply, DamagedRow, decode_call, typed_row
from forebay.replay.engine.call_request import CallRequest
from forebay.replay.errors import RecordingDamaged
from forebay.replay.model import RunRecord
from forebay.replay.recording_reader import RecordingMade, RecordingReader
from forebay.replay.recording_rows import Damage
from forebay.replay.recording_schema import META, SAMPLES
from forebay.replay.recording_seal import DIFFERS, seal_problem

MOST_PAGE_PROBLEMS = 20
CALLS_PER_LOOK = 16
_ROW_FIELDS = ("uid", "instance_id", "group_id", "epoch", "slot", "fork", "became", "reward", "error")


class RecordedCall(NamedTuple):
    """What an engine was asked, and what it answered."""

    seq: int
    """Place in the order in which calls were asked."""
    began_s: float
    """When it was asked: seconds since the Unix epoch."""
    request: CallRequest
    reply: CallReply


class Recording(RecordingReader):
    """A recording in a file, as its users open it."""

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """The recording in the file ``path``, for ``with``. Raises as the constructor does."""
        return cls(path)

    def rows(self, steps: str | Sequence[tuple[int, int]] | None = None) -> Iterator[dict[str, Any]]:
        """Each sample as a dict, group by group. Groups that cannot be read are skipped, and listed in ``damage``.

        A row has the fields of the sample's body, then ``group_id``, ``epoch``, ``slot``, ``fork``, ``became``,
        ``reward`` and ``error`` as recorded, and its group's ``group_state`` and ``group_reason``. ``steps``, and what
        is raised, are those of ``groups``.
        """
        for group in self.groups(steps):
            try:
                samples = [] if group.group_id in self.left_out else self.samples(group.group_id)
                bodies = [self.body(each) for each in samples]
            except RecordingDamaged as error:
                if (damage := Damage.of(error, f"group {group.group_id}")) not in self.damage:
                    self.damage.append(damage)
                continue
            of_group = {"group_state": group.state, "group_reason": group.reason}
            for sample, body in zip(samples, bodies, strict=True):
                fields = {name: getattr(sample, name) for name in _ROW_FIELDS}
                yield json.loads(as_json(body)) | fields | of_group  # msgspec refuses half a surrogate pair

    def calls(self) -> Iterator[RecordedCall]:
        """The calls of an engine that can be read, in the order in which they were asked; ``damage`` gets the others.

        Raises ``RecordingDamaged`` where their table cannot be read.
        """
        for each in _read_calls(self):
            if not isinstance(each, Damage):
                yield each
            elif each not in self.damage:
                self.damage.append(each)

    def verify(self) -> list[Damage]:
        """Read all of it; everything that is not what was written, each once."""
        parts = (_file, _pages, _meta, _groups, _bodies, _calls)
        return list(dict.fromkeys(damage for part in parts for damage in _guarded(part(self))))


def _guarded(found: Iterator[Damage]) -> Iterator[Damage]:
    """What one part meets and cannot go round must not keep the others."""
    try:
        yield from found
    except ForebayError as error:
        yield Damage.of(error, "the database")


def _file(recording: RecordingReader) -> Iterator[Damage]:
    reason = seal_problem(recording.path)
    # What an engine's calls are written to may grow: such a file has no last line.
    if reason == DIFFERS or (reason and not _has_calls_alone(recording)):
        yield Damage("the file", reason)


def _has_calls_alone(recording: RecordingReader) -> bool:
    try:
        return not any(
            recording.tables.ask(name, f"SELECT 1 FROM {name} LIMIT 1")  # noqa: S608 - our own names
            for name in ("meta", "groups", "samples", "batches")
        )
    except ForebayError:
        return False


def _pages(recording: RecordingReader) -> Iterator[Damage]:
    rows = recording.tables.ask("the database", f"PRAGMA quick_check({MOST_PAGE_PROBLEMS})")
    yield from (Damage("the database", "; ".join(str(text).splitlines())) for (text,) in rows if text != "ok")


def _meta(recording: RecordingReader) -> Iterator[Damage]:
    kinds: dict[str, type[msgspec.Struct]] = {"run": RunRecord, "made": RecordingMade}
    rows = recording.tables.ask("meta", f"SELECT {META.selection} FROM meta")  # noqa: S608 - our own names
    for row in rows:
        try:
            recording.tables.read(META, row, kinds.get(row[0], msgspec.Struct))
        except ForebayError as error:
            yield Damage.of(error, "meta")
    missing = kinds.keys() - {row[0] for row in rows}
    if len(missing) == 1:
        yield Damage(f"meta {missing.pop()!r}", "it is missing")


def _groups(recording: RecordingReader) -> Iterator[Damage]:
    if not recording.has_run:
        return
    recording.batches()
    groups = recording.groups()
    yield from recording.damage
    for group in groups:
        if group.group_id in recording.left_out:
            continue
        try:
            recording.samples(group.group_id)
        except ForebayError as error:
            yield Damage.of(error, f"group {group.group_id}")


def _bodies(recording: RecordingReader) -> Iterator[Damage]:
    num = recording.made.num_samples if recording.has_run else 0
    seen, is_named = 0, False
    for each in recording.tables.scan(SAMPLES, num):
        if isinstance(each, Damage):
            is_named = True
            yield each
            continue
        seen += 1
        try:
            recording.body(recording.sample(each))
        except ForebayError as error:
            yield Damage.of(error, f"samples {each[0]}")
    if seen < num and not is_named:
        yield Damage("samples", f"{seen} of {num} rows are there")


def _calls(recording: RecordingReader) -> Iterator[Damage]:
    return (each for each in _read_calls(recording) if isinstance(each, Damage))


def _read_calls(recording: RecordingReader) -> Iterator[RecordedCall | Damage]:
    after: int | None = -1
    while after is not None:
        rows = recording.tables.ask(
            "calls",
            f"SELECT {COLUMNS} FROM calls WHERE seq > ? ORDER BY seq LIMIT {CALLS_PER_LOOK}",  # noqa: S608 - our own names
            after,
        )
        for row in rows:
            try:
                request, reply = decode_call(typed_row(row), recording.frames)
            except DamagedRow as error:
                yield Damage(f"calls {row[0]}", str(error))
            else:
                yield RecordedCall(row[0], row[-1], request, reply)
        if rows and rows[-1][0] <= after:  # its pages lead in circles
            yield Damage("calls", f"behind call {after} comes call {rows[-1][0]}")
            return
        after = rows[-1][0] if rows else None
