"""Routed experts from an engine to a trainer: every row is the engine's own, for forks and with workers too."""

from typing import Any

import pytest

from forebay.client import BufferClient
from tests.e2e.payloads import numbered_rows
from tests.engines.moe_engine import MoEEngine, routes_of
from tests.kit import ServerProcess

NUM_ROWS = 2
GROUP_SIZE = 3


@pytest.mark.parametrize("workers", [None, 2], ids=["no workers", "two workers"])
def test_a_trainer_gets_the_row_of_each_token(server: ServerProcess, make_payload: Any, workers: int | None) -> None:
    with MoEEngine(lambda call: f"{call.prompt} {call.number}").in_thread() as engine:
        payload = make_payload(engine.url, numbered_rows(NUM_ROWS), arrays=["routed_experts"], max_attempts=1)
        del payload["num_repeat_per_sample"]
        given = {"workers": workers} if workers else {}
        run = server.start_run(**payload | {"task_type": "sub_agent", "group_size": GROUP_SIZE, **given})
        with BufferClient(server.url) as client:
            client.attach(run.run_id)
            for _ in range(NUM_ROWS):
                batch = client.read(num_groups=1, wait_s=60)
                assert batch is not None
                assert len(batch.rows) == 2 * GROUP_SIZE, "each rollout has a fork"
                arrays = client.arrays(batch, batch.rows, needs=["routed_experts"])
                for row, rows in zip(batch.rows, arrays, strict=True):
                    tokens = row["tokens"]
                    expected = routes_of(tokens[:-1], ["default"] * len(tokens))
                    assert rows["routed_experts"].dense(len(tokens) - 1).tolist() == expected
                client.ack(batch)
        counts = run.wait_for_state("finished")["counts"]
        assert "capture_unrouted_tokens" not in counts
