"""The promise of delivery as a plain model: what a trainer was told, and what follows from it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Promise:
    """What a trainer was told of a batch, and what follows from it."""

    groups: list[str]
    rows: list[Any]
    meta_info: dict[str, Any]
    request_id: str
    is_self_acking: bool
    state: str = "leased"
    checkpoint: int | None = None
    num_sending: int = 1
    has_arrived: bool = False
    until_s: float = 0.0


@dataclass
class Model:
    """The promise itself: who has which group, and which checkpoint holds it."""

    batches: dict[str, Promise] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    discarded: set[str] = field(default_factory=set)

    def owner(self, group: str) -> str:
        """The state that the group must be in."""
        if group in self.discarded:
            return "discarded"
        states = {batch.state for batch in self.batches.values() if group in batch.groups}
        assert not {"leased", "acked"} <= states
        return next((state for state in ("leased", "acked") if state in states), "ready")

    def is_takeable(self, batch: Promise) -> bool:
        """Whether it can be acknowledged."""
        is_late = batch.state == "expired" and all(self.owner(group) == "ready" for group in batch.groups)
        return batch.state in ("leased", "acked") or is_late

    def of_request(self, request_id: str) -> tuple[str, Promise] | None:
        found = [item for item in self.batches.items() if request_id and item[1].request_id == request_id]
        return found[-1] if found else None
