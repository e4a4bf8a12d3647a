"""Groups in a run, and batches that are there."""

from typing import Any

from forebay.client import Batch, BufferClient
from tests.kit import NativeRun, make_group

REWARDS = [0.0, 1.0, 0.5, 0.25]


def fill(run: NativeRun, num_groups: int, first: int = 0) -> list[str]:
    """Write so many whole groups; their instances."""
    names = [f"g{number}" for number in range(first, first + num_groups)]
    for name in names:
        run.write(*make_group(name, REWARDS))
    return names


def num_groups(run: NativeRun, state: str) -> int:
    return int(run.view()["groups"][state])


def take(client: BufferClient, num_groups: int = 1, **asked: Any) -> Batch:
    batch = client.read(num_groups=num_groups, wait_s=20, **asked)
    assert batch is not None
    return batch
