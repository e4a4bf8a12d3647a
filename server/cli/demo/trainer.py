"""The trainer of the demo: it starts a run and polls for groups over slime's routes, as slime's client does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from forebay.core.errors import ForebayError

START_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 100.0


@dataclass
class RewardMean:
    """The mean reward of all samples, out of the replies' ``meta_info``.

    Each describes what arrived since the last successful reply; an unsuccessful one consumes nothing.
    """

    _count: int = 0
    _total: float = 0.0
    _newest: tuple[int, float] = (0, 0.0)

    def add(self, meta_info: dict[str, Any], *, is_consumed: bool) -> None:
        """Note one reply."""
        count = int(meta_info["total_samples"])
        self._newest = (count, count * float(meta_info["avg_reward"]))
        if is_consumed:
            self._count += count
            self._total += self._newest[1]
            self._newest = (0, 0.0)

    @property
    def value(self) -> float | None:
        """None before the first sample."""
        count = self._count + self._newest[0]
        return (self._total + self._newest[1]) / count if count else None


@dataclass
class SlimeTrainer:
    """Polls the server at ``url``; ``is_over`` once it says that nothing will come any more."""

    url: str
    rewards: RewardMean = field(default_factory=RewardMean)
    num_batches: int = 0
    num_rows: int = 0
    best_row: dict[str, Any] | None = None
    """One of the highest reward in the newest batch."""
    is_over: bool = False

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=self.url, timeout=READ_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def start(self, payload: dict[str, Any]) -> str:
        """Start the run; its id."""
        reply = self._asked(lambda: self._http.post("/start_rollout", json=payload, timeout=START_TIMEOUT_S))
        return str(reply.raise_for_status().json()["run_id"])

    def poll(self) -> bool:
        """Ask for groups once; whether any came."""
        reply = self._asked(lambda: self._http.post("/get_rollout_data", json={}))
        self.is_over = reply.status_code == httpx.codes.GONE
        if self.is_over:
            return False
        told = reply.raise_for_status().json()
        rows, is_successful = told["data"]["data"], bool(told["success"])
        self.rewards.add(told["data"]["meta_info"], is_consumed=is_successful)
        if is_successful:
            self.num_batches += 1
            self.num_rows += len(rows)
            self.best_row = max(rows, key=lambda row: row.get("raw_reward", row["reward"]))
        return is_successful

    @staticmethod
    def _asked(call: Callable[[], httpx.Response]) -> httpx.Response:
        try:
            return call()
        except httpx.HTTPError as error:
            raise ForebayError(f"the server does not answer: {error}") from None
