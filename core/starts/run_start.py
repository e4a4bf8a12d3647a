"""What a run was last started with. It may be large, thus it is stored apart from what changes with each report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Self

from forebay.core.ids import InstanceId

LIST_FIELD = "skip_instance_ids"


@dataclass(frozen=True, slots=True)
class RunStart:
    """Never changed in place: another start, or another list to skip, is another value."""

    payload: dict[str, Any]
    """What was sent but for ``skip_instance_ids``, with the server's and slime's defaults."""
    listed_sha256: str = ""
    """Tells the ``skip_instance_ids`` of this start from another list, which may be long; "" where it sent none."""
    first_listed: Sequence[InstanceId] = ()
    """Ids that the first start of the run listed."""
    base_skip: Sequence[InstanceId] = ()
    """Ids (with multiplicity) that the current process skips besides the groups that the run holds."""

    @classmethod
    def of(cls, payload: dict[str, Any], listed: Sequence[InstanceId]) -> Self:
        """The first start of a run: its payload as it came, and the ids that this lists."""
        rest = {name: value for name, value in payload.items() if name != LIST_FIELD}
        digest = "" if payload.get(LIST_FIELD) is None else sha256(json.dumps(listed).encode()).hexdigest()
        return cls(rest, digest, listed, listed)

    def again(self, other: "RunStart") -> Self:
        """The same run, started as ``other``; what it skips is decided apart."""
        return replace(self, payload=other.payload, listed_sha256=other.listed_sha256)

    def is_like(self, other: "RunStart") -> bool:
        """Whether both were started with equal payloads and equal lists."""
        return (self.payload, self.listed_sha256) == (other.payload, other.listed_sha256)

    def skipping(self, ids: Sequence[InstanceId]) -> Self:
        """The same start, of which ``ids``, all of them listed by the first one, are to be skipped."""
        # All of them are the list itself, in another order: stored once.
        return replace(self, base_skip=self.first_listed if len(ids) == len(self.first_listed) else ids)

    def document(self) -> dict[str, Any]:
        """The same as JSON values."""
        is_same = self.base_skip is self.first_listed or self.base_skip == self.first_listed
        return {
            "payload": self.payload,
            "listed_sha256": self.listed_sha256,
            "first_listed": self.first_listed,
            "base_skip": None if is_same else self.base_skip,
        }

    @classmethod
    def restore(cls, document: Mapping[str, Any]) -> Self:
        """What ``document`` gave."""
        first, base = document["first_listed"], document["base_skip"]
        return cls(document["payload"], document["listed_sha256"], first, first if base is None else base)
