"""The demo's trainer: starts a run and polls for groups over slime's routes, as slime's client does."""

from dataclasses import dataclass, field
from typing import Any, Self

from forebay.core.errors import NoRun, RunEnded

START_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 100.0


@dataclass
class RewardMean:
    """The mean reward of all samples, computed from the replies' ``meta_info``.

    Each reply describes the samples since the last successful one; an unsuccessful reply consumes none.
    """

    _count: int = 0
    _total: float = 0.0
    _newest: tuple[int, float] = (0, 0.0)

    def add(self, meta_info: dict[str, Any], *, is_consumed: bool) -> None:
        """Add one reply."""
        # Until a reply has rows, each describes the samples of the previous one plus those that arrived since.
        count = int(meta_info["total_samples"])
        self._newest = (count, count * float(meta_info["avg_reward"]))
        if is_consumed:
            self._count += count
            self._total += self._newest[1]
            self._newest = (0, 0.0)

    @property
    def value(self) -> float | None:
        """The mean reward; None before the first sample."""
        count = self._count + self._newest[0]
        return (self._total + self._newest[1]) / count if count else None


@dataclass
class SlimeTrainer:
    """Polls the server at ``url``; ``is_over`` is set once the server says that the run is finished."""

    url: str
    rewards: RewardMean = field(default_factory=RewardMean)
    num_batches: int = 0
    num_rows: int = 0
    best_row: dict[str, Any] | None = None
    """A row with the highest reward in the newest batch."""
    is_over: bool = False

    def __post_init__(self) -> None:
        from forebay.client.calls.transport import Transport  # only a demo needs an HTTP client

        self._transport = Transport(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def start(self, payload: dict[str, Any]) -> str:
        """Start the run and return its id."""
        return str(self._posted("start_rollout", payload, START_TIMEOUT_S)["run_id"])

    def poll(self) -> bool:
        """Ask for groups once; return whether there were any."""
        try:
            reply = self._posted("get_rollout_data", {}, READ_TIMEOUT_S)
        except (RunEnded, NoRun):
            self.is_over = True
            return False
        rows, is_successful = reply["data"]["data"], bool(reply["success"])
        self.rewards.add(reply["data"]["meta_info"], is_consumed=is_successful)
        if is_successful:
            self.num_batches += 1
            self.num_rows += len(rows)
            self.best_row = max(rows, key=lambda row: row.get("raw_reward", row["reward"]))
        return is_successful

    def _posted(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        from forebay.client.calls.flow import decoded, json_call

        call = json_call("POST", path, body, timeout_s)
        return decoded(self._transport.ask(call), call)
