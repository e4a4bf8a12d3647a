"""Reads the rollouts of a recording one after another. Memory holds the bodies of one group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from forebay.client.calls.flow import read_json
from forebay.core.batch_tensors import TokenRow, token_row
from forebay.core.records.rows import GroupRow, SampleRow, StoredSample
from forebay.replay.errors import RecordingDamaged
from forebay.replay.recording import Recording
from forebay.replay.step_filter import batches_by_step, named_groups

Json = dict[str, Any]
_RECORDED = ("uid", "instance_id", "group_id", "epoch", "slot", "fork", "rollout_id", "reward", "error")


@dataclass(frozen=True)
class RolloutSample:
    """A sample with its body."""

    row: SampleRow
    body: bytes

    @cached_property
    def arrays(self) -> TokenRow[Any]:
        """Its tokens, with logprobs and loss mask as long as them."""
        return token_row([self.body])

    @cached_property
    def fields(self) -> Json:
        """The fields of the body without its arrays. A number too large for float64 is infinite."""
        fields: Json = read_json(self.arrays.rest)
        return fields


@dataclass(frozen=True)
class ExportedRollout:
    """The samples of one rollout, its main sample first, then its forks. A fork without a main sample is alone."""

    group: GroupRow
    step: int | None
    """The training step of the last batch with the group; None if it was never delivered."""
    samples: Sequence[RolloutSample]

    @property
    def reward(self) -> float | None:
        """The recorded reward; None for a failed rollout."""
        return self.samples[0].row.reward

    def recorded(self, sample: RolloutSample) -> Json:
        """What is recorded of a sample beside its body."""
        return {
            "run_id": sample.row.run_id,
            **{name: getattr(sample.row, name) for name in _RECORDED},
            "outcome": sample.row.rollout_outcome,
            "became": sample.row.outcome,
            "step": self.step,
            "group_state": self.group.state.value,
            "group_reason": self.group.reason,
            "received_at_s": sample.row.received_at_s,
        }


@dataclass
class RolloutReader:
    """The rollouts of a recording, group by group, as often as it is iterated."""

    recording: Recording
    steps: str = ""
    """Only groups in the batches of these steps: ``50-60,70``."""
    groups: Sequence[str] = ()
    """Only these groups: ids, beginnings of ids, or instances."""
    min_reward: float | None = None
    """Only rollouts with a reward of at least this."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why the samples of a group cannot be read, by group id. Filled while iterating."""

    def __iter__(self) -> Iterator[ExportedRollout]:
        """Raises ``NotRecorded`` for unknown steps or groups, ``InvalidInput`` for invalid steps."""
        by_step = batches_by_step(self.recording.batches())
        steps = {key: step for step, batches in by_step.items() for batch in batches for key in batch.group_ids}
        for group in named_groups(self.recording.groups(self.steps or None), self.groups):
            try:
                yield from self._of_group(group, steps.get(group.group_id))
            except RecordingDamaged as error:
                self.left_out[group.group_id] = error.detail

    def _of_group(self, group: GroupRow, step: int | None) -> Iterator[ExportedRollout]:
        stored = self.recording.samples(group.group_id)
        chosen = [samples for samples in _by_rollout(stored) if self._counts(samples[0].row)]
        flat = sorted((each for samples in chosen for each in samples), key=lambda each: each.location.segment)
        bodies = dict(zip(map(id, flat), self.recording.bodies(flat), strict=True))  # a file may repeat a uid
        for samples in chosen:
            yield ExportedRollout(group, step, [RolloutSample(each.row, bodies.pop(id(each))) for each in samples])

    def _counts(self, main: SampleRow) -> bool:
        return self.min_reward is None or (main.reward is not None and main.reward >= self.min_reward)


def _by_rollout(stored: Sequence[StoredSample]) -> list[list[StoredSample]]:
    """The samples of a group by rollout, in the order of their main samples."""
    forks: dict[tuple[int, str], list[StoredSample]] = {}
    for each in stored:
        if each.row.fork:
            forks.setdefault((each.row.slot, each.row.rollout_id), []).append(each)
    mains = [each for each in stored if not each.row.fork]
    found = [[each, *forks.pop((each.row.slot, each.row.rollout_id), [])] for each in mains]
    return found + [[each] for orphans in forks.values() for each in orphans]
