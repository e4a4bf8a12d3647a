"""Numbers of a batch for the trainer's log: what is counted, and which names are always there."""

import numpy as np
import pytest

from forebay.client import AsyncBufferClient, BufferClient, SampleWriter
from forebay.core.group import DiscardReason
from forebay.core.outcome import RolloutOutcome
from tests.kit import ServerProcess, make_sample

COUNTS = {
    *(f"forebay/groups/{state}" for state in ("ready", "open")),
    *(f"forebay/dropped/{reason}" for reason in DiscardReason),
    *(f"forebay/outcome/{outcome}" for outcome in RolloutOutcome),
}
"""Names that every batch has, besides the wait."""


@pytest.mark.parametrize("as_tensors", [True, False])
async def test_the_numbers_are_those_of_the_samples(server: ServerProcess, as_tensors: bool) -> None:
    run = server.start_run(group_size=3)
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    tokens = {
        "tokens": np.arange(5, dtype=np.int32),
        "logprobs": np.zeros(5, np.float32),
        "loss_mask": mask,
        "epoch": 0,
    }
    first = make_sample(slot=0, reward=2.0, rollout_id="r0", weight_version=5, outcome="truncated", **tokens)
    forked = make_sample(
        slot=0, reward=2.0, rollout_id="r0", fork=1, weight_version=4, **(tokens | {"loss_mask": 1 - mask})
    )
    old = make_sample(slot=1, reward=-1.0, weight_version=1, **tokens)
    failed = make_sample(slot=2, reward=..., status="failed", outcome="judge_failure")
    flat = [make_sample(instance_id="flat", slot=slot, reward=0.5) for slot in range(3)]
    with SampleWriter(server.url, run.run_id) as writer:
        for sample in (*flat, first, forked, old, failed):
            writer.write(sample)
    async with AsyncBufferClient(server.url, as_tensors=as_tensors) as client:
        await client.attach(run.run_id)
        batch = await client.read(num_groups=1, wait_s=20)
        assert batch is not None
        before = await client.metrics(batch)
        await client.set_weight_version(6)
        after = await client.metrics(batch)
    assert len(batch.rows) == 4  # the failed slot has a copy of a sample, which is not counted twice
    assert after == pytest.approx(
        {
            **dict.fromkeys(COUNTS, 0.0),
            "forebay/reward/mean": 0.5,
            "forebay/reward/std": 1.5,
            "forebay/reward/min": -1.0,
            "forebay/reward/max": 2.0,
            "forebay/reward/all_mean": (1.5 + 2 - 1) / 5,  # of the discarded group too
            "forebay/staleness/mean": 3.0,
            "forebay/staleness/max": 5.0,
            "forebay/length/mean": 2.75,
            "forebay/length/max": 3.0,
            "forebay/dropped/invalid": 1.0,
            "forebay/outcome/ok": 4.0,
            "forebay/outcome/truncated": 1.0,
            "forebay/outcome/judge_failure": 1.0,
            "forebay/wait_s": batch.wait_s,
        }
    )
    assert all(type(value) is float for value in after.values())
    assert before.keys() == {name for name in after if "staleness" not in name}


def test_a_wait_is_measured_and_what_is_unknown_is_left_out(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        assert client.read(num_groups=1, wait_s=0.3) is None
        run.write(make_sample(reward=0.0), make_sample(reward=1e300))
        batch = next(client.batches(num_groups=1))
        numbers = client.metrics(batch)
    assert 0 < batch.wait_s == numbers["forebay/wait_s"] < 20
    assert numbers.keys() == COUNTS | {"forebay/wait_s", "forebay/reward/all_mean"} | {
        f"forebay/reward/{kind}" for kind in ("mean", "min", "max")
    }
