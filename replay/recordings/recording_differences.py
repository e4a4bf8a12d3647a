"""Where two recordings first differ: what was asked, their groups and what became of them, samples, bodies."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from forebay.core.binary_sample import as_json, is_binary
from forebay.replay.differences import Difference, first_difference
from forebay.replay.model import GroupRecord, RunRecord, SampleRecord
from forebay.replay.provenance import strip
from forebay.replay.recording_reader import LeftOutGroup
from forebay.replay.recordings.recorded_code import CodeFile
from forebay.replay.recordings.recording import Recording

ENDED_WELL = frozenset({"ready", "leased", "acked"})
"""States that only tell how far a trainer has read."""

_RUN_FIELDS = ("task_type", "origin", "input_sha256", "generator_sha256", "generator_hooks", "generator_contract")
_OWN_AFFAIRS = frozenset(
    {"name", "run_id", "replay", "keep_bodies", "input_file", "remote_engine_url", "remote_buffer_url", "engine_url"}
)
"""Fields of a payload that say where and under which name, and not what was asked."""
_GROUP_FIELDS = ("instance_id", "epoch", "reason", "is_salvaged", "num_samples", "num_failed")
_SAMPLE_FIELDS = ("uid", "slot", "became", "reward", "error", "rollout_id", "oldest_version", "fork", "rollout_outcome")


class FoundDifference(NamedTuple):
    """The first difference: where, and how the two sides differ there."""

    place: str
    difference: Difference

    def in_words(self, one: str, other: str) -> str:
        """One line."""
        return f"{self.place}: {self.difference.in_words(one, other)}"


def find_difference(one: Recording, other: Recording) -> FoundDifference | None:
    """The first difference of two recordings; None where they tell the same.

    Names, times, and how far a trainer has read are not compared, and neither is the field ``replayed_from`` of bodies.
    Groups are compared in the order in which they were ready, those that never were behind them. Raises
    ``RecordingDamaged``.
    """
    for place, a, b in _pairs(one, other):
        if (difference := first_difference(a, b)) is not None:
            return FoundDifference(place, difference)
    return None


def _pairs(one: Recording, other: Recording) -> Iterator[tuple[str, Any, Any]]:
    yield from _code_of_both(one, other)
    yield "the run", _asked(one.run), _asked(other.run)
    ordered = [_in_order(each) for each in (one, other)]
    names = [[_name(group) for group in groups] for groups in ordered]
    yield "the groups", names[0], names[1]
    for a, b in zip(*ordered, strict=True):
        yield f"group {a.group_id} of instance {a.instance_id!r}", _group(a), _group(b)
        yield from _of_group(one, other, a.group_id)


def _code_of_both(one: Recording, other: Recording) -> Iterator[tuple[str, Any, Any]]:
    """Of the last start of each: how often a run was started anew says nothing."""
    sides = [_newest_code(each) for each in (one, other)]
    for path in sorted(set().union(*sides)) if all(sides) else ():
        contents = [
            {path: _spelling(each.code_content(files[path]))} if path in files else {}
            for each, files in zip((one, other), sides, strict=True)
        ]
        yield "the code", contents[0], contents[1]


def _newest_code(recording: Recording) -> dict[str, CodeFile]:
    files = recording.code()
    return {file.path: file for file in files if file.start == files[-1].start}


def not_compared(one: Recording, other: Recording) -> dict[str, LeftOutGroup]:
    """By id, the groups whose samples neither has: nothing of them but what became of them is compared."""
    return {key: each for key, each in one.left_out.items() if key in other.left_out}


def _of_group(one: Recording, other: Recording, group_id: str) -> Iterator[tuple[str, Any, Any]]:
    left_out = [each.left_out.get(group_id) for each in (one, other)]
    if any(left_out):
        words = ["all" if each is None else f"left out: {each.reason}" for each in left_out]
        yield f"samples of group {group_id}", words[0], words[0] if all(left_out) else words[1]
        return
    samples = [sorted(each.samples(group_id), key=_place) for each in (one, other)]
    place = f"samples of group {group_id}"
    uids = [[each.uid for each in side] for side in samples]
    yield place, uids[0], uids[1]
    for a, b in zip(*samples, strict=True):
        yield f"sample {a.uid}", _fields(a, _SAMPLE_FIELDS), _fields(b, _SAMPLE_FIELDS)
        bodies = strip(one.body(a)), strip(other.body(b))
        if bodies[0] != bodies[1]:
            yield f"the body of sample {a.uid}", _content(bodies[0]), _content(bodies[1])
            # Equal as values: another spelling of the same JSON.
            yield f"the body of sample {a.uid}", _spelling(bodies[0]), _spelling(bodies[1])


def _asked(run: RunRecord) -> dict[str, Any]:
    payload = {name: value for name, value in run.payload.items() if name not in _OWN_AFFAIRS}
    return {**_fields(run, _RUN_FIELDS), "payload": payload}


def _in_order(recording: Recording) -> list[GroupRecord]:
    groups = recording.groups()
    if recording.damage:
        raise recording.tables.damaged(recording.damage[0])
    return sorted(groups, key=lambda group: (group.order == 0, group.order or group.number))


def _group(group: GroupRecord) -> dict[str, Any]:
    return {"state": "ready" if group.state in ENDED_WELL else group.state, **_fields(group, _GROUP_FIELDS)}


def _name(group: GroupRecord) -> str:
    return f"{group.group_id} (instance {group.instance_id!r}, epoch {group.epoch})"


def _place(sample: SampleRecord) -> tuple[bool, int, int, str]:
    return sample.became != "member", sample.slot, sample.fork, sample.uid


def _fields(record: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _content(body: bytes) -> Any:
    """A body as JSON values: arrays of a binary one as lists."""
    try:
        return {**msgspec.json.decode(as_json(body)), "is_binary": is_binary(body)}
    except (msgspec.DecodeError, RecursionError):  # Python reads more: half a surrogate pair, say
        return _spelling(body)


def _spelling(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")
