"""Agents of examples/ against the real SGLang: what the gateway recorded of them is what the engine sampled."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.capture.checking import check
from tests.conftest import MakeServer
from tests.generators.agent_kit import stored
from tests.kit import ServerProcess

pytestmark = pytest.mark.sglang

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_DELTA = 1e-4


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("generators")
    for path in [file for name in ("shell_agent", "anthropic_agent") for file in (EXAMPLES / name).glob("*.py")]:
        shutil.copy(path, folder)
    return module_servers(generators=folder, start_wait_s=60)


@pytest.mark.parametrize("address", ["sglang_url", "sglang_router_url"])
@pytest.mark.parametrize("name", ["shell_agent", "anthropic_agent"])
async def test_an_agent_is_recorded_token_by_token(
    request: pytest.FixtureRequest, server: ServerProcess, sglang_url: str, tmp_path: Path, address: str, name: str
) -> None:
    rows = [{"instance_id": n, "prompt": f"What is {n} + {n}?", "label": str(2 * n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    engine = request.getfixturevalue(address)
    params: dict[str, Any] = {"max_tokens": 48, "temperature": 1.0}
    run = server.start_run(
        name, group_size=2, input_file=str(tmp_path / "rows.jsonl"), remote_engine_url=engine, sampling_params=params
    )
    samples = [sample for of_instance in stored(run).values() for sample in of_instance]
    assert len(samples) == 8
    assert {sample["outcome"] for sample in samples} <= {"ok", "truncated"}
    for sample in samples:
        told = await check(sglang_url, sample)
        assert told.num_tokens + told.num_unknown == sum(sample["loss_mask"]) > 0
        assert told.max_delta <= MAX_DELTA
