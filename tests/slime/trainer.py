"""A trainer that behaves as slime's own does towards its rollout buffer, but for its long pauses between polls.

Written anew from what slime's ``rollout_buffer_example.py`` does: it starts until a 2xx, polls with ``{}`` until it has
rows enough for a step, groups them by instance id, takes the newest groups, and keeps the ids of finished groups as
metadata that its checkpoint carries.
"""

import copy
import ssl
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from tests.kit import TIME_LIMIT_S

Item = dict[str, Any]
NO_TLS = ssl.create_default_context()
"""Made once: making one takes longer than a call."""
POLL_S = 0.05
NEEDED_KEYS = {"uid", "instance_id", "messages", "reward", "extra_info"}
NEEDED_META = {"total_samples", "avg_reward", "finished_groups"}


class RunOver(Exception):
    """The buffer answered 410: nothing will come any more."""


@dataclass(frozen=True)
class Checkpoint:
    """What a restarted trainer still knows."""

    rollout_id: int
    metadata: dict[str, list[Any]]

    @property
    def listed(self) -> list[Any]:
        """``skip_instance_ids`` of the next start."""
        return [instance_id for ids in self.metadata.values() for instance_id in ids]


NOTHING_SAVED = Checkpoint(0, {})


@dataclass
class SlimeTrainer:
    """``payload`` is what its arguments make of the start's body; ``groups_per_step`` is its rollout batch size."""

    url: str
    payload: dict[str, Any]
    groups_per_step: int = 2
    resumed_from: Checkpoint = NOTHING_SAVED
    metadata: dict[str, list[Any]] = field(default_factory=dict)
    delivered: list[Any] = field(default_factory=list)
    """The instance id of every group that came in a reply, kept or not."""
    pool: list[list[Item]] = field(default_factory=list)
    run_id: str = ""

    def __post_init__(self) -> None:
        self.rollout_id = self.resumed_from.rollout_id
        self.metadata = copy.deepcopy(self.resumed_from.metadata)
        self.group_size = int(self.payload["num_repeat_per_sample"])

    def start(self) -> Self:
        """Send the start again and again, without a pause, until it is accepted."""
        body = {**self.payload, "remote_buffer_url": self.url, "skip_instance_ids": self.resumed_from.listed}
        until_s = time.monotonic() + TIME_LIMIT_S
        while time.monotonic() < until_s:
            try:
                answer = httpx.post(f"{self.url}/start_rollout", json=body, timeout=TIME_LIMIT_S, verify=NO_TLS)
                answer.raise_for_status()
            except httpx.HTTPError:
                continue
            assert answer.json()["message"] == "Rollout started"
            self.run_id = answer.json()["run_id"]
            return self
        raise AssertionError("the start was never accepted")

    def step(self) -> list[list[Item]]:
        """The groups of one optimiser step. Raises ``RunOver``."""
        missing = self.groups_per_step - len(self.pool)
        if missing > 0:
            rows, metas = self._fetch(missing * self.group_size)
            self.pool += self._newest_groups(rows, missing)
            self.metadata[str(self.rollout_id)] = [i for meta in metas for i in meta["finished_groups"]]
        self.rollout_id += 1
        batch, self.pool = self.pool[: self.groups_per_step], self.pool[self.groups_per_step :]
        return batch

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.rollout_id, copy.deepcopy(self.metadata))

    def steps_to_the_end(self) -> None:
        """Train until the buffer says that the run is over."""
        until_s = time.monotonic() + 4 * TIME_LIMIT_S
        while time.monotonic() < until_s:
            try:
                self.step()
            except RunOver:
                return
        raise AssertionError("the trainer would poll for ever")

    def _fetch(self, num_rows: int) -> tuple[list[Item], list[dict[str, Any]]]:
        rows: list[Item] = []
        metas = []
        while len(rows) < num_rows:
            data = self._poll()
            rows += data["data"]
            metas.append(data["meta_info"])
        return rows, metas

    def _poll(self) -> dict[str, Any]:
        until_s = time.monotonic() + 2 * TIME_LIMIT_S
        while time.monotonic() < until_s:
            try:
                answer = httpx.post(f"{self.url}/get_rollout_data", json={}, timeout=100, verify=NO_TLS)
                if answer.status_code == 410:
                    raise RunOver(answer.text)
                answer.raise_for_status()
            except httpx.TransportError:  # the buffer is down: slime's trainer tries again as well
                time.sleep(POLL_S)
                continue
            told: dict[str, Any] = answer.json()
            if told["success"]:
                self._note(told["data"])
                data: dict[str, Any] = told["data"]
                return data
            time.sleep(POLL_S)
        raise AssertionError("nothing came, and no end was told")

    def _note(self, data: dict[str, Any]) -> None:
        assert data["meta_info"].keys() >= NEEDED_META
        assert all(item.keys() >= NEEDED_KEYS for item in data["data"])
        sizes = Counter(item["instance_id"] for item in data["data"])
        assert set(sizes.values()) == {self.group_size}, sizes
        self.delivered += sizes

    def _newest_groups(self, rows: list[Item], num: int) -> list[list[Item]]:
        groups: dict[Any, list[Item]] = {}
        for row in rows:
            groups.setdefault(row["instance_id"], []).append(row)
        assert num < len(rows)
        newest = sorted(groups.values(), key=lambda group: max(map(_timestamp, group)), reverse=True)
        return newest[:num]


def _timestamp(item: Item) -> float:
    return float(item.get("timestamp") or item["extra_info"].get("timestamp") or 0)
