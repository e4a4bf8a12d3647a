"""examples/grpo_loop with the real SGLang: three steps, their weights and their data."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forebay.client.tensors import collate
from forebay.engines.tiny.model import ensure_model
from tests.examples.grpo_kit import LoopProcess, check_history, read_all_again
from tests.kit import TIME_LIMIT_S
from tests.sglang.conftest import engine_with

pytestmark = pytest.mark.sglang

NUM_STEPS = 3


@pytest.fixture(scope="module")
def adding_engine_url(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An SGLang of its own with the built-in model, which can add a little: its weights are going to change."""
    with engine_with(sglang_python, ensure_model(), tmp_path_factory.mktemp("sglang") / "engine.log") as url:
        yield url


def test_three_steps_change_the_weights_that_the_samples_name(adding_engine_url: str, tmp_path: Path) -> None:
    loop = LoopProcess(tmp_path / "loop", adding_engine_url)
    with loop.running(NUM_STEPS) as process:
        told, _ = process.communicate(timeout=240)
    assert process.returncode == 0, told
    check_history(loop.history(), NUM_STEPS)
    info = httpx.get(f"{adding_engine_url}/model_info", timeout=TIME_LIMIT_S).json()
    assert (info["weight_version"], Path(info["model_path"]).name) == (str(NUM_STEPS), f"step-{NUM_STEPS:05d}")
    batch = read_all_again(loop.folder, tmp_path / "server", NUM_STEPS)
    data = collate(batch, 0)
    assert not data["retokenized"].any(), "the tokens are not those that were sampled"
    assert not data["logprobs"].isnan().any()
    assert (data["logprobs"][data["loss_mask"]] < 0).any()
    for row in batch.rows:
        assert len(row["tokens"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert 0 < sum(row["loss_mask"]) < len(row["tokens"])
