"""Loops of trainers that run once more: by steps, by samples of a stream, and with generating and writing in one."""

import asyncio
from pathlib import Path
from typing import Any

from forebay.client import BufferClient, SampleWriter
from forebay.replay.skip import SkipManager
from tests.kit import Json, NativeRun, ServerProcess, make_sample
from tests.replay.replay_kit import plain, start_replay, until_ended
from tests.replay.skip.skip_kit import Rollouts, Samples, config

STEPS = (1, 2, 3)
GROUP_SIZE = 2


def test_a_loop_of_steps_executes_nothing_again(tmp_path: Path) -> None:
    rollouts = Rollouts()

    def train() -> list[Any]:
        SkipManager.init(config(tmp_path))
        return [rollouts.at(step, [f"prompt {step}"]) for step in STEPS]

    assert train() == train()
    assert len(rollouts.calls) == len(STEPS)


def test_a_stream_of_samples_executes_nothing_again(tmp_path: Path) -> None:
    samples = Samples()

    async def train() -> list[Any]:
        SkipManager.init(config(tmp_path, "async_rollout"))
        return await asyncio.gather(*(samples.generate("prompt", f"sample_0_{index}") for index in STEPS))

    assert asyncio.run(train()) == asyncio.run(train())
    assert len(samples.calls) == len(STEPS)


def test_a_loop_that_generates_and_writes_in_one_is_run_again_as_a_replay(server: ServerProcess) -> None:
    """There is no function to skip: whole groups come once more, through duplicates, groups, hooks and counts."""
    generated: list[str] = []

    def generate_and_write(run: NativeRun, step: int) -> None:
        with SampleWriter(server.url, run.run_id) as writer:
            for slot in range(GROUP_SIZE):
                generated.append(f"{step}/{slot}")
                place = {"instance_id": f"row {step}", "epoch": 0, "slot": slot, "rollout_id": f"{step}-{slot}"}
                writer.write(make_sample(uid=generated[-1], reward=float(slot), response_length=5, **place))

    def train(run: NativeRun, *, is_replayed: bool) -> list[list[Json]]:
        batches = []
        with BufferClient(server.url) as client:
            client.attach(run.run_id)
            for step in STEPS:
                if not is_replayed:
                    generate_and_write(run, step)
                batch = client.read(num_groups=1, step=step)
                batches.append([plain(row) for row in batch.rows])
                client.checkpoint(step)
        return batches

    recorded = server.start_run("idle", GROUP_SIZE)
    first = train(recorded, is_replayed=False)
    recorded.stop()
    run = start_replay(server, recorded.run_id)
    assert train(run, is_replayed=True) == first
    assert len(generated) == len(STEPS) * GROUP_SIZE
    view = until_ended(run)
    assert view["counts"] == {"replay_hits": len(generated), "replay_tokens": 5 * len(generated)}
    assert view["groups"]["acked"] == len(STEPS)
    assert view["samples"]["member"] == len(generated)
