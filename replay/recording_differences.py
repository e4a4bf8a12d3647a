"""Compares two recordings: the number of differences and the first one of each kind."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from forebay.core.binary_sample import as_json, is_binary
from forebay.core.group import SLIME_REWARD_RANGE
from forebay.core.records.recording_rows import LeftOutGroup, RecordedRun
from forebay.core.records.rows import GroupRow, StoredSample
from forebay.replay.conditions import NOT_INHERITED, NOT_NEEDED
from forebay.replay.differences import Difference, first_difference
from forebay.replay.recording import Recording
from forebay.replay.replayed_bodies import strip

COUNTED = ("groups", "samples", "tokens", "rewards")
KINDS = ("code", "settings", *COUNTED, "bodies")

_JUDGED_VALID = frozenset({"ready", "leased", "acked"})
"""States that differ only by how far a trainer has read."""
_RUN_FIELDS = ("task_type", "input_sha256", "generator_hooks", "generator_contract")
_NEED_NOT_SHARE = NOT_INHERITED | NOT_NEEDED | {"engine_url", "num_reward_workers", "queue_size"}
"""Payload fields in which a replay may differ: names, addresses, and how its processes work."""
_VERDICT_FIELDS = ("state", "reason", "is_salvaged")
"""Compared only if neither group is open."""
_GROUP_FIELDS = ("instance_id", "epoch", "num_samples", "num_failed")
_SAMPLE_FIELDS = ("uid", "slot", "outcome", "error", "rollout_id", "oldest_version", "fork", "rollout_outcome")


class RecordingComparison:
    """Counts the differences between two recordings."""

    def __init__(self) -> None:
        self.num_different = Counter[str]()
        """By kind. For tokens: the positions at which the token ids of two samples differ."""
        self.num_compared = Counter[str]()
        """Groups and samples that exist in either recording."""
        self.first: dict[str, tuple[str, Difference]] = {}
        """By kind, the place and value of the first difference. Empty if the recordings are equal."""
        self.not_compared: dict[str, LeftOutGroup] = {}
        """By id, groups whose samples are in neither recording. Only their outcomes are compared."""

    def note(self, kind: str, place: str, one: Any, other: Any, number: int = 1) -> bool:
        """Compare two values; a difference counts ``number`` times. Returns whether they differ."""
        difference = first_difference(one, other)
        if difference is not None:
            self.num_different[kind] += number
            self.first.setdefault(kind, (place, difference))
        return difference is not None

    def in_words(self, one: str, other: str) -> dict[str, str]:
        """By kind, a line that describes the first difference."""
        found = {kind: self.first[kind] for kind in KINDS if kind in self.first}
        return {kind: f"{place}: {each.in_words(one, other)}" for kind, (place, each) in found.items()}


def compare_recordings(one: Recording, other: Recording) -> RecordingComparison:
    """Compare two recordings, matching groups by id. Raises ``RecordingDamaged``.

    Not compared: names, addresses, times, how processes worked, the order of groups, how far a trainer has read, and
    the field ``replayed_from`` of bodies. If a group is open in one recording, only its samples are compared.
    """
    found, runs = RecordingComparison(), (one.run, other.run)
    found.note("code", "the code", runs[0].generator_files, runs[1].generator_files)
    found.note("settings", "the run", _asked(*runs), _asked(*reversed(runs)))
    ours, theirs = ({group.group_id: group for group in each.groups()} for each in (one, other))
    for group_id in ours | theirs:
        _compare_groups(found, ours.get(group_id), theirs.get(group_id))
        if group_id in ours and group_id in theirs:
            _compare_samples(found, group_id, one, other)
    return found


def _asked(run: RecordedRun, other: RecordedRun) -> dict[str, Any]:
    """What ``run`` was started with, limited to the fields known for both runs."""
    known = [name for name in _RUN_FIELDS if "" not in (getattr(run, name), getattr(other, name))]
    payload = {"reward_range": SLIME_REWARD_RANGE if run.origin == "slime" else None} | run.payload
    payload = {name: each for name, each in payload.items() if each is not None and name not in _NEED_NOT_SHARE}
    return {**_fields(run, known), "payload": payload}


def _compare_groups(found: RecordingComparison, one: GroupRow | None, other: GroupRow | None) -> None:
    there = [each for each in (one, other) if each is not None]
    names = _GROUP_FIELDS if any(each.state == "open" for each in there) else (*_VERDICT_FIELDS, *_GROUP_FIELDS)
    outcomes = [_fields(each, names) for each in (one, other)]
    for each in outcomes:
        if each.get("state") in _JUDGED_VALID:
            each["state"] = "ready"
    found.num_compared["groups"] += 1
    found.note("groups", f"group {there[0].group_id} of instance {there[0].instance_id!r}", outcomes[0], outcomes[1])


def _compare_samples(found: RecordingComparison, group_id: str, one: Recording, other: Recording) -> None:
    left_out = [each.left_out.get(group_id) for each in (one, other)]
    if all(left_out):
        found.not_compared |= {each.group_id: each for each in left_out if each is not None}
        return
    if any(left_out):
        words = ["all" if each is None else f"left out: {each.reason}" for each in left_out]
        found.note("samples", f"samples of group {group_id}", words[0], words[1])
        return
    ours, theirs = (_by_place(each.samples(group_id)) for each in (one, other))
    for place in sorted(ours | theirs):
        found.num_compared["samples"] += 1
        found.num_different["samples"] += _differ(found, one, other, ours.get(place), theirs.get(place))


def _by_place(samples: Sequence[StoredSample]) -> dict[tuple[bool, int, int, int], StoredSample]:
    """Samples by the key that pairs them: slot and fork, members of the group first."""
    found: dict[tuple[bool, int, int, int], StoredSample] = {}
    numbers = Counter[tuple[bool, int, int]]()
    for sample in samples:
        place = (sample.row.outcome != "member", sample.row.slot, sample.row.fork)
        found[*place, numbers[place]] = sample
        numbers[place] += 1
    return found


def _differ(
    found: RecordingComparison, one: Recording, other: Recording, a: StoredSample | None, b: StoredSample | None
) -> bool:
    """Whether two samples differ in anything. The caller counts the samples; other differences are noted here."""
    ours, theirs = (None if each is None else each.row for each in (a, b))
    sample = f"sample {next(row.uid for row in (ours, theirs) if row)}"
    differ = found.note("samples", sample, _fields(ours, _SAMPLE_FIELDS), _fields(theirs, _SAMPLE_FIELDS), 0)
    if a is None or b is None:
        return True
    differ |= found.note("rewards", sample, {"reward": a.row.reward}, {"reward": b.row.reward})
    bodies = strip(one.body(a)), strip(other.body(b))
    if bodies[0] == bodies[1]:
        return differ
    contents = [_content(each) for each in bodies]
    tokens = [each.pop("tokens", []) for each in contents]
    is_list = all(isinstance(each, list) for each in tokens)
    num_tokens = sum(x != y for x, y in zip_longest(*tokens)) if is_list else 1
    differ |= found.note("tokens", f"the tokens of {sample}", tokens[0], tokens[1], num_tokens)
    differ |= found.note("bodies", f"the body of {sample}", contents[0], contents[1])
    # The values are equal, but the JSON is spelled differently.
    return differ or found.note("bodies", f"the body of {sample}", _spelling(bodies[0]), _spelling(bodies[1]))


def _fields(record: msgspec.Struct | None, names: Sequence[str]) -> dict[str, Any]:
    return {} if record is None else {name: getattr(record, name) for name in names}


def _content(body: bytes) -> dict[str, Any]:
    """A body as JSON values, binary arrays as lists, without the fields compared as columns."""
    try:
        content = msgspec.json.decode(as_json(body))
    except (msgspec.DecodeError, RecursionError):  # Python reads more, such as unpaired surrogates
        return {"text": _spelling(body)}
    columns = (*_SAMPLE_FIELDS, "reward")
    return {name: each for name, each in content.items() if name not in columns} | {"is_binary": is_binary(body)}


def _spelling(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")
