"""``kill -9`` of the server while it replays, again and again: nothing is lost, doubled, or other than recorded."""

import os
import random
import time
from typing import Any

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, make_group, poll_until
from tests.replay.replay_kit import SIZE, groups_of, plain, start_replay, write_group

pytestmark = pytest.mark.soak

ROUNDS = int(os.environ.get("ROUNDS", "10"))
"""By hand, `make test-soak ROUNDS=50`."""
NUM_GROUPS = 60
PAYLOAD: dict[str, Any] = {"min_valid_group_size_ratio": 0.5, "group_timeout_seconds": 1.0}


def recorded_run(server: ServerProcess) -> NativeRun:
    """Full groups, and between them short ones: salvaged, timed out."""
    run = server.start_run("idle", SIZE, **PAYLOAD)
    for number in range(NUM_GROUPS):
        if number % 10 == 3:
            run.write(*make_group(f"salvaged {number}", [0.0, 1.0, 1.0], epoch=0))
        elif number % 10 == 7:
            run.write(*make_group(f"too few {number}", [1.0], epoch=0))
        else:
            write_group(run, f"whole {number}", [0.0, 1.0, 0.5, 0.25], padding="x" * 2_000)
    poll_until(lambda: run.view()["groups"]["open"] == run.view()["num_groups_full"])
    run.stop()
    return run


def read_with_kills(server: ServerProcess, run: NativeRun, rng: random.Random) -> list[list[dict[str, Any]]]:
    """What was acknowledged, group by group, by a reader whose server dies a few times."""
    batches: dict[str, list[dict[str, Any]]] = {}
    num_kills = rng.choice([1, 2, 3])
    while True:
        if num_kills and rng.random() < 0.2:
            num_kills -= 1
            time.sleep(rng.random() * 0.05)  # in the middle of whatever it does
            server.kill9()
            server.restart()
        try:
            reply = run.client.post(f"{run.path}/batches", json={"num_groups": 1, "wait_s": 5}, timeout=60)
            if reply.status_code == 410:
                return list(batches.values())
            assert reply.is_success, reply.text
            if (batch := reply.json())["batch_id"] is not None:
                batches[batch["batch_id"]] = [plain(row) for row in batch["data"]]
                run.ack(batch)
        except httpx.TransportError:  # it was killed before; the lease is asked for again
            server.restart()


@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_a_killed_replay_loses_and_doubles_nothing(make_server: MakeServer) -> None:
    rng = random.Random(ROUNDS)
    server = make_server(segment_bytes=1 << 20)
    recorded = recorded_run(server)
    source = groups_of(recorded)
    expected = [batch["data"] for batch in iter(lambda: take_one(recorded), None)]
    assert len(expected) > NUM_GROUPS * 0.8
    for number in range(ROUNDS):
        settings = {"max_buffer_size": rng.choice([SIZE, 5 * SIZE, 1_000])}
        run = start_replay(server, recorded.run_id, **settings)
        assert read_with_kills(server, run, rng) == expected, number
        view = run.view()
        assert (view["state"], view["has_ended"]) == ("finished", True)
        assert view["counts"]["replay_hits"] == sum(each["num_samples"] for each in source.values())
        assert groups_of(run) == groups_of(recorded), number


def take_one(run: NativeRun) -> dict[str, Any] | None:
    reply = run.client.post(f"{run.path}/batches", json={"num_groups": 1})
    if reply.status_code == 410 or reply.json()["batch_id"] is None:
        return None
    run.ack(reply.json())
    batch: dict[str, Any] = reply.json()
    return batch
