"""A run of many groups, most of which a trainer has read; and what each page of ``/ui/`` asks about it."""

import json
from urllib.parse import urlencode

from forebay.core.ids import group_id
from tests.benchmarks.load import post, send
from tests.kit import Json, NativeRun, ServerProcess

GROUP_SIZE = 10
GROUPS_PER_BATCH = 100
GROUPS_PER_REQUEST = 50


class LargeRun:
    """Rewards are 0 and 1. In the newest tenth, those of every second group are equal, which discards it.

    A tenth of the groups is ready, the others were delivered. Each instance has two epochs; of a third one, some groups
    are open, with one sample each.
    """

    def __init__(self, server: ServerProcess, num_groups: int) -> None:
        limits = {"group_timeout_seconds": 3_600, "group_deadline_seconds": 3_600}
        self.run: NativeRun = server.start_run(group_size=GROUP_SIZE, **limits)
        self.num_groups = num_groups
        self.num_discarded, self.num_ready = num_groups // 20, num_groups // 10
        self.num_delivered = num_groups - self.num_discarded - self.num_ready
        self.num_open, self.num_batches = num_groups // 100, 0
        self.group_id, self.uid = self.named(0), "0/1"
        """The oldest group, and its sample with an annotation."""

    def is_discarded(self, group: int) -> bool:
        """Whether the rewards of a group are equal."""
        return self.num_groups * 9 // 10 <= group < self.num_groups and group % 2 == 1

    def sample(self, group: int, slot: int) -> Json:
        """A sample of a group, both by number."""
        instance_id, epoch = self._place(group)
        reward = 1.0 if self.is_discarded(group) else float(slot % 2)
        place = {"instance_id": instance_id, "epoch": epoch, "slot": slot}
        return {"uid": f"{group}/{slot}", **place, "reward": reward, "messages": []}

    def named(self, group: int) -> str:
        """The id of a group."""
        return group_id(*self._place(group))

    def _place(self, group: int) -> tuple[str, int]:
        epoch, row = divmod(group, self.num_groups // 2)
        return f"row-{row}", epoch

    def fill(self) -> "LargeRun":
        """Write, read and acknowledge all of it."""
        step = 20 * GROUPS_PER_REQUEST
        for first in range(0, self.num_groups, step):
            self._write(range(first, first + step), GROUP_SIZE)
            self._read_to(self.num_delivered * (first + step) // self.num_groups)
        self._write(range(self.num_groups, self.num_groups + self.num_open), 1)
        return self

    def _write(self, groups: range, num_slots: int) -> None:
        parts = [groups[at : at + GROUPS_PER_REQUEST] for at in range(0, len(groups), GROUPS_PER_REQUEST)]

        def request(index: int) -> bytes:
            lines = [json.dumps(self.sample(group, slot)) for group in parts[index] for slot in range(num_slots)]
            return post(f"{self.run.path}/samples", "\n".join(lines).encode(), b"application/x-ndjson")

        send(self.run.server.url, request, len(parts), 4)

    def _read_to(self, num_groups: int) -> None:
        while (self.num_batches + 1) * GROUPS_PER_BATCH <= num_groups:
            batch = self.run.take(num_groups=GROUPS_PER_BATCH, step=self.num_batches)
            assert len(batch["data"]) == GROUPS_PER_BATCH * GROUP_SIZE
            if not self.num_batches:
                self._annotate(batch["batch_id"])
            self.num_batches += 1

    def _annotate(self, batch_id: str) -> None:
        note = {"uid": self.uid, "step": 0, "values": {"loss": 0.5}}
        self.run.client.post(f"{self.run.path}/batches/{batch_id}/annotations", json=note).raise_for_status()

    # --- what the pages ask, as `server/ui/assets` does

    def overview(self) -> list[str]:
        """The requests of the overview."""
        return ["/v1/overview"]

    def run_page(self, **filters: str | int) -> list[str]:
        """Those of the run when its page opens; ``filters`` choose the groups."""
        query = urlencode({"state": "discarded", "limit": 100, "newest": "true", "samples": "true", **filters})
        return [f"{self.run.path}/history?limit=20", f"{self.run.path}/groups?{query}", self.run.path, *self.overview()]

    def run_page_again(self) -> list[str]:
        """Those of the run every 2 s."""
        return [f"{self.run.path}/history?after={self.num_batches - 4}&limit=20"]

    def group_page(self) -> list[str]:
        """Those of the oldest group, with the bodies of all its samples."""
        at = self._group_path
        bodies = [f"{at}/body?{urlencode({'uid': f'0/{slot}'})}" for slot in range(GROUP_SIZE)]
        return [at, f"{at}/epochs", self.run.path, *bodies]

    def rollout_page(self) -> list[str]:
        """Those of a rollout of the oldest group."""
        at, uid = self._group_path, urlencode({"uid": self.uid})
        notes = f"{self.run.path}/annotations?{uid}&group={self.group_id}&limit=1000"
        return [at, notes, self.run.path, f"{at}/body?{uid}"]

    @property
    def _group_path(self) -> str:
        return f"{self.run.path}/groups/{self.group_id}"
