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
    """Replies that are still going out."""
    num_holding: int = 1
    """Those of them for which its time waits: none once one has arrived."""
    has_arrived: bool = False
    until_s: float = 0.0

    def begin_reply(self) -> None:
        """One more goes out."""
        self.num_sending += 1
        self.num_holding += 1

    def end_reply(self, arrives: bool) -> None:
        """One of them ends."""
        self.num_sending -= 1
        self.num_holding = 0 if arrives else max(0, self.num_holding - 1)
        self.has_arrived |= arrives


@dataclass
class Model:
    """The promise itself: who has which group, which checkpoint holds it, and what is too old."""

    max_staleness: int
    batches: dict[str, Promise] = field(default_factory=dict)
    steps: dict[int, int | None] = field(default_factory=dict)
    """The weight version at the first report of each checkpoint."""
    discarded: set[str] = field(default_factory=set)
    version: int | None = None
    made_by: dict[str, int] = field(default_factory=dict)
    """The weight version of each group that tells it."""

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

    def discard_stale(self) -> None:
        """What becomes of ready groups when some are chosen."""
        oldest = (self.version or 0) - self.max_staleness
        old = [group for group, version in self.made_by.items() if version < oldest]
        self.discarded |= {group for group in old if self.owner(group) == "ready"}

    def undo(self, step: int | None) -> set[str]:
        """Go back to a checkpoint: the batches that this takes back."""
        undone = set()
        for batch_id, batch in self.batches.items():
            is_within = batch.checkpoint is not None and step is not None and batch.checkpoint <= step
            if batch.state in ("leased", "acked", "expired") and not is_within:
                batch.state, batch.checkpoint = "revoked", None
                undone.add(batch_id)
        self.version = None if step is None else self.steps[step]
        self.steps = {known: self.steps[known] for known in self.steps if step is not None and known <= step}
        return undone

    def of_request(self, request_id: str) -> tuple[str, Promise] | None:
        found = [item for item in self.batches.items() if request_id and item[1].request_id == request_id]
        return found[-1] if found else None
