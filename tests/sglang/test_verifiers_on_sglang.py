"""A taskset of the real verifiers on the real SGLang: rewards are verifiers' own, and tokens those of the engine."""

from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.environments.verifiers_kit import SUMS, copied_tasksets, runs_like_verifiers, samples_of, variables_for
from tests.kit import interpreter

pytestmark = pytest.mark.sglang


async def test_rewards_are_those_of_verifiers_and_tokens_those_of_the_engine(
    make_server: MakeServer, sglang_url: str, tmp_path: Path
) -> None:
    python = interpreter("FOREBAY_ENVIRONMENT_PYTHON", "verifiers and Harbor", "make test-sglang")
    env = variables_for(copied_tasksets(tmp_path))
    server = make_server(environment_python=python, env=env, start_wait_s=60)
    (run,) = await runs_like_verifiers(server, [sglang_url], [SUMS], python, env, tmp_path)
    assert len(samples_of(run)) == 4
