"""examples/grpo_loop: it trains, and after a kill goes on where it was."""

import random
import time
from pathlib import Path

import httpx
import pytest

from forebay.client.tensors import collate
from tests.engines.tiny.conftest import running_engine
from tests.examples.grpo_kit import LoopProcess, RecordingProxy, check_history, read_all_again
from tests.kit import TIME_LIMIT_S

NUM_STEPS = 4


@pytest.mark.soak
def test_a_killed_loop_goes_on_and_nothing_is_generated_or_trained_on_twice(tmp_path: Path) -> None:
    with running_engine() as (_, engine_url), RecordingProxy(engine_url).serving() as proxy:
        loop = LoopProcess(tmp_path / "loop", proxy.url)
        with loop.running(NUM_STEPS + 100):
            loop.wait_steps(2)
            stored = loop.stored_slots()
        num_asked = len(proxy.asked)
        assert stored <= set(proxy.asked)
        with loop.running(NUM_STEPS) as process:
            told, _ = process.communicate(timeout=120)
        assert process.returncode == 0, told
        assert not stored & set(proxy.asked[num_asked:]), "samples that were there were generated again"
        num_steps = len(loop.history())
        assert num_steps >= NUM_STEPS
        info = httpx.get(f"{engine_url}/model_info", timeout=TIME_LIMIT_S).json()
    check_history(loop.history(), num_steps)
    assert info["weight_version"] == str(num_steps)
    assert info["model_path"] == str(loop.folder / "models" / f"step-{num_steps:05d}")
    assert (loop.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    batch = read_all_again(loop.folder, tmp_path / "server", num_steps)
    assert not collate(batch, 0)["retokenized"].any(), "the tokens are not those that were sampled"


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_killed_the_loop_goes_on(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    loop = LoopProcess(tmp_path / "loop")
    parts = ["trainer", "forebay.server.cli", "forebay.engines.tiny"]
    for part in dice.sample(parts * 2, k=6):
        with loop.running(100) as process:
            loop.wait_steps(len(loop.history()) + 1)
            time.sleep(dice.uniform(0, 2))  # not to wait, but to kill it anywhere in a step
            if part == "trainer":
                continue
            loop.part(part).kill()
            told, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "ended with exit code -9" in told
        assert f"Start it again with --dir {loop.folder}" in told
    num_steps = len(loop.history()) + 2
    with loop.running(num_steps) as process:
        told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    check_history(loop.history(), num_steps)
    read_all_again(loop.folder, tmp_path / "server", num_steps)
