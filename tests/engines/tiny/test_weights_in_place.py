"""Weights that change in place under names that were used before: each logprob is right, or its token is marked."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess
from tests.lent import lend_runs
from tests.sglang.partial_kit import until_in_the_middle
from tests.weights_kit import WeightsRun, load_weights, marked, scores_of, weights_run, wrong

PROMPTS = [f"What is {n} + 2?" for n in range(4)]
NUM_SAMPLES = 2 * len(PROMPTS)
Change = Callable[[WeightsRun, Path], Awaitable[object]]


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


async def updated(run: WeightsRun, folder: Path) -> None:
    """By the server."""
    await run.client.update_weights(1, folder, "in_place")


async def brought(run: WeightsRun, folder: Path) -> None:
    """By the trainer, in a pause of the server's."""
    async with run.client.paused_engines("in_place", weight_version=1):
        await load_weights(run.engine_url, folder, "1", flushes_cache=False)


async def announced(run: WeightsRun, folder: Path) -> None:
    """By the trainer, which only announces it."""
    await load_weights(run.engine_url, folder, "1", flushes_cache=False)
    await run.client.set_weight_version(1)


async def renamed(run: WeightsRun, folder: Path) -> None:
    """By the trainer, which calls them by another version."""
    await load_weights(run.engine_url, folder, "2", flushes_cache=False)
    await run.client.set_weight_version(2)


async def unnamed(run: WeightsRun, folder: Path) -> None:
    """By the trainer, which leaves the engine the name that its weights had."""
    await load_weights(run.engine_url, folder, "1", flushes_cache=False)
    await run.client.set_weight_version(2)


SOAK = pytest.mark.soak
CHANGES = pytest.mark.parametrize("change", [updated, pytest.param(brought, marks=SOAK), announced])


@CHANGES
async def test_a_second_run_that_uses_a_version_again_has_its_own_cache(
    lending: ServerProcess, own_engine_url: str, model_folder: Path, other_folder: Path, tmp_path: Path, change: Change
) -> None:
    for folder in (model_folder, other_folder):
        async with weights_run(lending, own_engine_url, tmp_path, PROMPTS) as run:
            await change(run, folder)
            samples = await run.sample()
        scores = await scores_of(own_engine_url, samples)
        assert [wrong(sample, scored) for sample, scored in zip(samples, scores, strict=True)] == [[]] * NUM_SAMPLES
        assert [marked(sample) for sample in samples] == [set()] * NUM_SAMPLES
        assert {sample["weight_version"] for sample in samples} == {1}


@CHANGES
async def test_a_rewound_trainer_that_uses_a_version_again_has_another_cache(
    lending: ServerProcess, own_engine_url: str, model_folder: Path, other_folder: Path, tmp_path: Path, change: Change
) -> None:
    async with weights_run(lending, own_engine_url, tmp_path, PROMPTS) as run:
        for step, folder in enumerate((model_folder, other_folder)):
            await change(run, folder)
            samples = await run.sample()
            await run.client.checkpoint(step)
            await run.client.rewind(step)
            scores = await scores_of(own_engine_url, samples)
            assert [wrong(sample, scored) for sample, scored in zip(samples, scores, strict=True)] == [[]] * NUM_SAMPLES
            assert [marked(sample) for sample in samples] == [set()] * NUM_SAMPLES


@pytest.mark.parametrize(
    "change",
    [updated, pytest.param(brought, marks=SOAK), pytest.param(renamed, marks=SOAK), pytest.param(unnamed, marks=SOAK)],
)
async def test_calls_on_their_way_through_a_change_are_exact_or_marked(
    lending: ServerProcess, own_engine_url: str, model_folder: Path, other_folder: Path, tmp_path: Path, change: Change
) -> None:
    async with weights_run(lending, own_engine_url, tmp_path, PROMPTS * 10) as run:
        await announced(run, model_folder)
        assert not any(map(marked, await run.sample()))
        # More than the engine takes at once: those that wait find their prompts in the cache of the old weights.
        rollouts = run.start(400, num_process=80)
        await until_in_the_middle(own_engine_url, 64, num_tokens=1)
        await change(run, other_folder)
        await rollouts
        samples = await run.rows()
    new = await scores_of(own_engine_url, samples)
    await load_weights(own_engine_url, model_folder, "1", flushes_cache=True)
    old = await scores_of(own_engine_url, samples)
    assert [wrong(*each) for each in zip(samples, old, new, strict=True)] == [[]] * len(samples)
    assert sum(map(bool, map(marked, samples))) >= 64
