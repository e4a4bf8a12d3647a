"""Parameters of a run's last start. They may be large, so they are stored separately from what reports change."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Self

from forebay.core.ids import InstanceId

LIST_FIELD = "skip_instance_ids"
OF_ONE_START = frozenset({"name", "run_id", "start_id", LIST_FIELD, "remote_buffer_url", "replay", "evaluate"})
"""Fields that each start gives itself: no default, replay or evaluation has them from elsewhere."""
NO_LIMIT = 1 << 40
EVALUATION_FIELDS: dict[str, Any] = {
    "num_epoch": 1,
    "evaluation": True,
    "oversampling": None,
    "arrays": None,
    "max_buffer_size": NO_LIMIT,
    "max_buffer_bytes": NO_LIMIT,
    "alarm_after_groups": NO_LIMIT,
    "alarm_lost_ratio": 1.0,
}
"""Fields of every evaluation's start. No trainer reads its groups, so they must not fill up or raise an alarm."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """Immutable: another start, or another list to skip, is a new value."""

    payload: dict[str, Any]
    """The payload without ``skip_instance_ids``, with the server's and slime's defaults."""
    listed_sha256: str = ""
    """Digest of this start's ``skip_instance_ids``, which may be long; "" if it had none."""
    first_listed: Sequence[InstanceId] = ()
    """Ids listed by the first start of the run."""
    base_skip: Sequence[InstanceId] = ()
    """Ids (with multiplicity) that the current process skips in addition to the run's own groups."""

    @classmethod
    def of(cls, payload: dict[str, Any], listed: Sequence[InstanceId]) -> Self:
        """Make the first start of a run from its original payload and the ids that it lists."""
        rest = {name: value for name, value in payload.items() if name != LIST_FIELD}
        digest = "" if payload.get(LIST_FIELD) is None else sha256(json.dumps(listed).encode()).hexdigest()
        return cls(rest, digest, listed, listed)

    def again(self, other: "RunStart") -> Self:
        """Make another start of the same run from ``other``; the ids to skip are decided separately."""
        return replace(self, payload=other.payload, listed_sha256=other.listed_sha256)

    def is_like(self, other: "RunStart") -> bool:
        """Whether both starts have equal payloads and equal lists."""
        return (self.payload, self.listed_sha256) == (other.payload, other.listed_sha256)

    def skipping(self, ids: Sequence[InstanceId]) -> Self:
        """Replace the ids to skip; all ``ids`` were listed by the first start."""
        # As many as listed means the list itself in another order, which is then stored once.
        return replace(self, base_skip=self.first_listed if len(ids) == len(self.first_listed) else ids)

    def document(self) -> dict[str, Any]:
        """Convert the start to JSON values."""
        is_same = self.base_skip is self.first_listed or self.base_skip == self.first_listed
        return {
            "payload": self.payload,
            "listed_sha256": self.listed_sha256,
            "first_listed": self.first_listed,
            "base_skip": None if is_same else self.base_skip,
        }

    @classmethod
    def restore(cls, document: Mapping[str, Any]) -> Self:
        """Load a start that ``document`` made."""
        first, base = document["first_listed"], document["base_skip"]
        return cls(document["payload"], document["listed_sha256"], first, first if base is None else base)
