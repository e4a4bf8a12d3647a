"""Recorded samples that replace rollouts: the slots of a group that have one, and their bodies in this run."""

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
    """Fields of a body that place it in a run."""

    uid: Field = msgspec.UNSET
    epoch: Field = msgspec.UNSET
    slot: Field = msgspec.UNSET
    rollout_id: Field = msgspec.UNSET
    raw_reward: Field = msgspec.UNSET
    reward_parts: Field = msgspec.UNSET
    extra_info: Field = msgspec.UNSET


_is_digest = re.compile("[0-9a-f]{16}").fullmatch
_decode_names = msgspec.json.Decoder(_Names).decode


@dataclass(frozen=True)
class ReplayedSample:
    """One stored sample."""

    record: SampleRow
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        """JSON fields of the sample, without the arrays of a binary body."""
        fields: dict[str, Any] = msgspec.json.decode(self._split()[1])
        return fields

    def edited(self, changes: Mapping[str, Any], removed: Sequence[str] = ()) -> "ReplayedSample":
        """Return a copy with changed fields. Arrays and the order of fields are kept."""
        fields = {name: value for name, value in self.fields.items() if name not in removed}
        return replace(self, body=self._split()[0] + msgspec.json.encode({**fields, **changes}))

    def names(self) -> _Names:
        """Return the fields that place the sample in a run."""
        return _decode_names(self._split()[1])

    def _split(self) -> tuple[bytes, bytes]:
        start = json_start(self.body) if is_binary(self.body) else 0
        return self.body[:start], self.body[start:]


@dataclass(frozen=True)
class ReplayedRollout:
    """Recorded samples of one slot's rollout: forks first, the main one last."""

    head: GroupHead
    samples: tuple[ReplayedSample, ...]

    @property
    def main(self) -> ReplayedSample:
        """The sample that fills the slot."""
        return self.samples[-1]

    @property
    def slot(self) -> int:
        """Slot of the rollout, both in the recording and in this run."""
        return self.main.record.slot

    def row_digest(self, row: TaskRow) -> str | None:
        """Digest of the row it was made from; None if not recorded, or if ``row`` has its own field of that name."""
        own = row.fields.get("extra_info")
        info = value_of(self.main.names().extra_info)
        if "row" in row.fields or (isinstance(own, dict) and "row" in own) or not isinstance(info, dict):
            return None
        digest = info.get("row")
        return digest if isinstance(digest, str) and _is_digest(digest) else None


def recorded_rollouts(found: RecordedBodies, slots: Sequence[int]) -> dict[int, ReplayedRollout]:
    """Return the completely recorded rollouts of ``slots`` by slot. Rollouts with a damaged body are left out."""
    rollouts = {}
    for slot, samples in found.by_slot().items():
        # Fields of unregistered writers may have the same names but other meanings.
        is_whole = all(body and not record.is_foreign for record, body in samples)
        if slot in slots and is_whole and not samples[-1][0].fork:
            rollouts[slot] = ReplayedRollout(found.head, tuple(ReplayedSample(*each) for each in samples))
    return rollouts


def placed(rollout: ReplayedRollout, planned: GroupPlan, run_id: str) -> Iterator[tuple[Sample, bytes]]:
    """Yield the samples of a recorded rollout for its slot in ``planned``: each as a writer's sample and its body.

    Bodies are unchanged except for the field that names their origin. Samples of another epoch become this run's own
    samples, with its uid, epoch and rollout.
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
        # Samples of other writers have neither epoch nor slot; they get those at which they were stored.
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
