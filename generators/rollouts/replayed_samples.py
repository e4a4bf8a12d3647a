"""Recorded samples that take the place of rollouts: which slots of a group have one, and their bodies in this run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from forebay.client.sample_writer.outbox import Sample
from forebay.core.binary_sample import Field, is_binary, json_start, value_of
from forebay.core.ids import rollout_uid
from forebay.core.records.rows import SampleRow
from forebay.core.task_row import TaskRow
from forebay.generators.rollouts.open_group import GroupPlan
from forebay.replay.group_frames import GroupHead, RecordedBodies
from forebay.replay.replayed_bodies import splice


class _Names(msgspec.Struct):
    """What a body says of where it belongs."""

    uid: Field = msgspec.UNSET
    epoch: Field = msgspec.UNSET
    slot: Field = msgspec.UNSET
    rollout_id: Field = msgspec.UNSET
    raw_reward: Field = msgspec.UNSET
    extra_info: Field = msgspec.UNSET


_is_digest = re.compile("[0-9a-f]{16}").fullmatch
_decode_names = msgspec.json.Decoder(_Names).decode


@dataclass(frozen=True)
class ReplayedSample:
    """One sample, as it was stored."""

    record: SampleRow
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """Its JSON, without the arrays of a binary body."""
        fields: dict[str, Any] = msgspec.json.decode(self._split()[1])
        return fields

    def edited(self, changes: Mapping[str, Any], removed: Sequence[str] = ()) -> "ReplayedSample":
        """The same with other values in some fields; its arrays stay as they are, and so does the order of fields."""
        fields = {name: value for name, value in self.fields.items() if name not in removed}
        return replace(self, body=self._split()[0] + msgspec.json.encode({**fields, **changes}))

    def names(self) -> _Names:
        """What it says of where it belongs."""
        return _decode_names(self._split()[1])

    def _split(self) -> tuple[bytes, bytes]:
        start = json_start(self.body) if is_binary(self.body) else 0
        return self.body[:start], self.body[start:]


@dataclass(frozen=True)
class ReplayedRollout:
    """What was recorded of the rollout of one slot: its samples, forks first, the main one last."""

    head: GroupHead
    samples: tuple[ReplayedSample, ...]

    @property
    def main(self) -> ReplayedSample:
        """The sample that fills the slot."""
        return self.samples[-1]

    @property
    def slot(self) -> int:
        """Where it was, and goes."""
        return self.main.record.slot

    def row_digest(self, row: TaskRow) -> str | None:
        """Of the row that it was made of; None where that was not recorded, or ``row`` has a field in its place."""
        own = row.fields.get("extra_info")
        info = value_of(self.main.names().extra_info)
        if "row" in row.fields or (isinstance(own, dict) and "row" in own) or not isinstance(info, dict):
            return None
        digest = info.get("row")
        return digest if isinstance(digest, str) and _is_digest(digest) else None


def recorded_rollouts(found: RecordedBodies, slots: Sequence[int]) -> dict[int, ReplayedRollout]:
    """By slot, those of ``slots`` that were recorded whole, as they came: no body of them is damaged."""
    rollouts = {}
    for slot, samples in found.by_slot().items():
        # What other writers call as we do may mean something else there.
        is_whole = all(body and not record.is_foreign for record, body in samples)
        if slot in slots and is_whole and not samples[-1][0].fork:
            rollouts[slot] = ReplayedRollout(found.head, tuple(ReplayedSample(*each) for each in samples))
    return rollouts


def placed(rollout: ReplayedRollout, planned: GroupPlan, run_id: str) -> Iterator[tuple[Sample, bytes]]:
    """The samples of a recorded rollout for its slot in ``planned``: what a writer says of each, and its body.

    Bodies are as they were recorded, but for the field that tells where they are from. Those of another epoch are this
    run's own samples: their uid, epoch and rollout say so.
    """
    head, is_substitute = rollout.head, rollout.head.epoch != planned.epoch
    for sample in rollout.samples:
        record = sample.record
        own = {
            "uid": _own_uid(rollout, record, planned, run_id) if is_substitute else record.uid,
            "epoch": planned.epoch,
            "slot": rollout.slot,
            "rollout_id": record.rollout_id.replace(head.group_id, planned.group_id, 1),
        }
        # Samples of other writers have neither epoch nor slot; here they go where they were put.
        names = sample.names()
        changes = {name: value for name, value in own.items() if not _says(value_of(getattr(names, name)), value)}
        body = (sample.edited(changes) if changes else sample).body
        body = splice(body, head.run_id, record.uid, substitute=is_substitute)
        about = {**own, "instance_id": planned.row.instance_id, "attempt": 0, "fork": record.fork}
        yield {**about, "status": "failed" if record.reward is None else "completed"}, body


def _says(found: object, wanted: object) -> bool:
    return found == wanted or str(found) == wanted or (found is None and wanted == "")


def _own_uid(rollout: ReplayedRollout, record: SampleRow, planned: GroupPlan, run_id: str) -> str:
    own, main = rollout_uid(run_id, planned.group_id, rollout.slot), rollout.main.record.uid
    if not record.fork:
        return own
    return own + (record.uid.removeprefix(main) if record.uid.startswith(main) else f"-f{record.fork}")
