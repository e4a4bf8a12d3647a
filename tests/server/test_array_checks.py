"""What a start that asks for arrays per token is answered: 422, or warnings about its engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedEngine
from forebay.web.serving import serve_app
from tests.attack.hostile_engine import hostile_engine
from tests.engines.conftest import FakeRouter
from tests.kit import NativeRun, ServerProcess, assert_error

FLAG = "start it with --enable-return-routed-experts"
UNREACHABLE = "http://127.0.0.1:1"


@asynccontextmanager
async def engine_with(**started_with: object) -> AsyncIterator[str]:
    async with ScriptedEngine(lambda _: "4") as engine:
        engine.started_with.update(started_with)
        yield engine.url


async def warnings_of(server: ServerProcess, tmp_path: Path, *urls: str, **given: Any) -> list[str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instance_id": "a", "prompt": "1 + 2?", "label": "3"}\n')
    body = {"task_type": "math", "group_size": 1, "input_file": str(rows), "remote_engine_url": list(urls)}
    reply = await asyncio.to_thread(
        server.client.post, "/v1/runs", json={**body, "arrays": ["routed_experts"], **given}
    )
    assert reply.status_code == 201, reply.text
    await asyncio.to_thread(NativeRun(server, reply.json()["run_id"]).stop)
    warnings: list[str] = reply.json()["warnings"]
    return warnings


async def test_engines_that_return_no_routed_experts_are_named_with_the_remedy(
    server: ServerProcess, tmp_path: Path
) -> None:
    async with engine_with(enable_return_routed_experts=True) as good, engine_with() as one, engine_with() as two:
        assert await warnings_of(server, tmp_path, good, UNREACHABLE) == []
        (warning,) = await warnings_of(server, tmp_path, good, one, two)
        assert warning == f"arrays: engine {one} (and 1 more) returns no routed experts: {FLAG}"
        async with serve_app(FakeRouter([good, one]).app) as port:
            (warning,) = await warnings_of(server, tmp_path, f"http://127.0.0.1:{port}")
            assert warning == f"arrays: engine {one} returns no routed experts: {FLAG}"
    async with engine_with(enable_return_routed_experts=True, enable_hierarchical_cache=True) as stale:
        (warning,) = await warnings_of(server, tmp_path, stale)
        assert "without --enable-hierarchical-cache" in warning


async def test_hidden_workers_and_other_engines_return_no_arrays(server: ServerProcess, tmp_path: Path) -> None:
    async with serve_app(FakeRouter([UNREACHABLE]).app) as port:
        (warning,) = await warnings_of(server, tmp_path, f"http://127.0.0.1:{port}")
        assert warning.startswith(f"arrays: engine http://127.0.0.1:{port} is a router")
    with hostile_engine(is_sglang=False) as other:
        (warning,) = await warnings_of(server, tmp_path, other.url)
        assert warning.startswith(f"arrays: engine {other.url} returns no arrays per token")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"arrays": ["routes"]}, "arrays"),
        ({"arrays": ["routed_experts"], "capture": False}, "arrays"),
        ({"arrays": ["routed_experts"], "capture": True, "task_type": "idle"}, "arrays"),
        ({"arrays": ["sampling_mask"]}, "sampling_params.top_k"),
        ({"arrays": ["sampling_mask"], "sampling_params": {"top_k": 5000}}, "sampling_params.top_k"),
    ],
    ids=["unknown", "not recorded", "without the base", "no top_k", "top_k too large"],
)
def test_arrays_that_no_call_could_return_are_refused(server: ServerProcess, given: dict[str, Any], field: str) -> None:
    body = {"task_type": "math", "group_size": 1, "remote_engine_url": UNREACHABLE, **given}
    assert_error(server.client.post("/v1/runs", json=body), 422, "invalid_input", field)


async def test_masks_are_asked_for_with_the_top_k_of_each_call(server: ServerProcess, tmp_path: Path) -> None:
    params = {"extra_body": {"top_k": "20"}}
    async with engine_with() as engine:
        assert await warnings_of(server, tmp_path, engine, arrays=["sampling_mask"], sampling_params=params) == []
