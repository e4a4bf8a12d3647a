"""A load that leaves nothing behind: samples that are written, read and acknowledged. What a server takes for it."""

import json
import os
from pathlib import Path

from tests.kit import NativeRun, ServerProcess

GROUP_SIZE = 8
GROUPS_AT_ONCE = 128


class SteadyLoad:
    """Writes groups of small samples to a run, and reads and acknowledges them, in turn.

    Several loads of one run need names of their own; one may then read what another has written.
    """

    def __init__(self, run: NativeRun, name: str = "", *, has_epochs: bool = True) -> None:
        self.run = run
        self._name = name
        self._has_epochs = has_epochs
        self._num_groups = 0

    @property
    def num_samples(self) -> int:
        """So many have been through."""
        return self._num_groups * GROUP_SIZE

    def sample(self, number: int) -> dict[str, object]:
        """The sample with this number, always the same."""
        group = number // GROUP_SIZE
        place: dict[str, object] = {"epoch": 0, "slot": number % GROUP_SIZE} if self._has_epochs else {}
        rest = {"reward": float(number % 2), "messages": [], **place}
        return {"uid": f"{self._name}uid-{number}", "instance_id": f"{self._name}row-{group}", **rest}

    def go_on_to(self, num_samples: int) -> None:
        """Until at least so many have been through."""
        while self.num_samples < num_samples:
            self._one_turn()

    def _one_turn(self) -> None:
        numbers = range(self.num_samples, self.num_samples + GROUPS_AT_ONCE * GROUP_SIZE)
        body = "\n".join(json.dumps(self.sample(number)) for number in numbers)
        kind = {"content-type": "application/x-ndjson"}
        response = self.run.client.post(f"{self.run.path}/samples", content=body, headers=kind)
        assert {result.get("outcome") for result in response.json()["results"]} == {"member"}, response.text[:2_000]
        batch = self.run.read(num_groups=GROUPS_AT_ONCE)
        assert len(batch["data"]) == len(numbers)
        self.run.ack(batch)
        self._num_groups += GROUPS_AT_ONCE


def resident_bytes(server: ServerProcess) -> int:
    """What of the server's memory is in RAM."""
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(server: ServerProcess) -> int:
    """The server's open files and sockets."""
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
