"""Weights that change in place on a real SGLang, under versions that were used before, against replays of tokens."""

from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess
from tests.lent import lend_runs
from tests.sglang.partial_kit import changed_weights, until_in_the_middle
from tests.weights_kit import load_weights, marked, scores_of, weights_run, wrong

pytestmark = pytest.mark.sglang

# Long, and alike to their ends: a cache has much to give.
PROMPTS = [f"Add the two numbers of this task and write the sum at the end of your answer: {n} + 2" for n in range(8)]
NUM_RUNNING = 16
"""As many calls does the engine take at once."""
VERSION = 1


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


async def test_a_version_used_again_in_place_leaves_no_wrong_logprob_unmarked(
    lending: ServerProcess, changing_url: str, sglang_model: Path, tmp_path: Path
) -> None:
    """A second run, whose trainer then goes back to the same version while calls run and wait."""
    new_weights = changed_weights(sglang_model, tmp_path / "new")
    async with weights_run(lending, changing_url, tmp_path, PROMPTS) as first:
        await first.client.update_weights(VERSION, sglang_model, "in_place")
        await first.sample()
    async with weights_run(lending, changing_url, tmp_path, PROMPTS * 2) as second:
        await second.client.update_weights(VERSION, new_weights, "in_place")
        samples = await second.sample()
        new = await scores_of(changing_url, samples)
        assert [wrong(*each) for each in zip(samples, new, strict=True)] == [[]] * len(samples)
        assert not any(map(marked, samples))

        rollouts = second.start(200, num_process=2 * NUM_RUNNING)
        await until_in_the_middle(changing_url, NUM_RUNNING)
        await second.client.update_weights(VERSION, sglang_model, "in_place")
        await rollouts
        crossing = await second.rows()
        after = await second.sample()
    old = await scores_of(changing_url, [*crossing, *after])
    await load_weights(changing_url, new_weights, "new", flushes_cache=True)
    new = await scores_of(changing_url, crossing)
    scored = zip(crossing, old[: len(crossing)], new, strict=True)
    assert [wrong(*each) for each in scored] == [[]] * len(crossing)
    assert sum(map(bool, map(marked, crossing))) >= NUM_RUNNING
    assert [wrong(*each) for each in zip(after, old[len(crossing) :], strict=True)] == [[]] * len(after)
    assert not any(map(marked, after))
