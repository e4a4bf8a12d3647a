"""Samples of the weights that engines had before the trainer's first word: version 0 of their run."""

import logging
from pathlib import Path

import httpx
import pytest

from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, Json, ServerProcess, make_group, poll_until
from tests.lent import lend_runs
from tests.weights_kit import weights_run

BOUND = {"max_staleness": 1}


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


def sampled_versions(rows: list[Json]) -> set[int | None]:
    """Of the tokens that were sampled."""
    return {span.get("weight_version") for row in rows for span in row["token_spans"] if span["source"] == "llm"} | {
        row.get("weight_version") for row in rows
    }


async def name_weights(engine_url: str, name: str) -> None:
    async with httpx.AsyncClient(base_url=engine_url, timeout=TIME_LIMIT_S) as http:
        (await http.post("/update_weight_version", json={"new_version": name})).raise_for_status()


@pytest.mark.parametrize("announced", [1, 2])
async def test_what_was_sampled_before_the_first_announcement_is_of_version_0(
    lending: ServerProcess, tmp_path: Path, announced: int
) -> None:
    async with (
        ScriptedEngine(lambda _: "x") as engine,
        weights_run(lending, engine.url, tmp_path, "ab", **BOUND) as run,
    ):
        await run.start(8)
        await run.client.set_weight_version(announced)
        batch = await run.client.read(num_groups=2, wait_s=0)
        if announced > BOUND["max_staleness"]:
            assert batch is None
            assert (await run.client.stats()).discarded == {"stale": 2}
        else:
            assert batch is not None
            assert sampled_versions(list(batch.rows)) == {0}
            assert batch.meta_info["staleness"] == {"1": 4}


@pytest.mark.parametrize("engine_name", ["default", "812", "3"])
async def test_what_the_trainer_announces_first_is_what_its_engines_have(
    lending: ServerProcess, tmp_path: Path, engine_name: str
) -> None:
    """Whatever the engine calls them; but a number below may be one of the trainer's own."""
    async with ScriptedEngine(lambda _: "x") as engine:
        await name_weights(engine.url, engine_name)
        async with weights_run(lending, engine.url, tmp_path, "ab", **BOUND) as run:
            await run.client.set_weight_version(500)
            await run.start(8)
            if engine_name == "3":
                assert await run.client.read(num_groups=1, wait_s=0) is None
                return
            assert sampled_versions(await run.rows()) == {500}
            await run.start(8)
            await run.client.set_weight_version(502)
            assert await run.client.read(num_groups=1, wait_s=0) is None
            assert (await run.client.stats()).discarded == {"stale": 2}


async def test_a_trainer_is_told_of_samples_that_bear_another_trainers_version(
    lending: ServerProcess, tmp_path: Path
) -> None:
    async with ScriptedEngine(lambda _: "x") as engine:
        await name_weights(engine.url, "812")
        async with weights_run(lending, engine.url, tmp_path, "ab", **BOUND) as run:
            await run.start(8)
            await run.client.set_weight_version(1)
            (warning,) = (await run.client.stats()).warnings
            assert "of version 1, have version 812" in warning
            assert warning in lending.log()
            await run.client.set_weight_version(2)
            assert (await run.client.stats()).warnings == [warning]


async def test_a_reader_with_a_bound_is_told_that_nothing_was_announced(
    lending: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "forebay.client")
    async with (
        ScriptedEngine(lambda _: "x") as engine,
        weights_run(lending, engine.url, tmp_path, "ab", **BOUND) as run,
    ):
        await run.start(8)
        first = await run.client.read(num_groups=1, wait_s=0)
        assert first is not None
        assert "set_weight_version" in first.meta_info["warning"]
        assert first.meta_info["warning"] in (await run.client.stats()).warnings
        assert first.meta_info["warning"] in caplog.text
        assert first.meta_info["warning"] in poll_until(lending.log)
        await run.client.set_weight_version(1)
        second = await run.client.read(num_groups=1, wait_s=0)
        assert second is not None
        assert "warning" not in second.meta_info
        assert (await run.client.stats()).warnings == []


def test_a_slime_run_whose_trainer_never_announces_loses_nothing(server: ServerProcess) -> None:
    run = server.start_slime("unannounced", group_size=2, max_staleness=0)
    for version in (0, 3):
        run.write(*make_group(version, [0.0, 1.0], weight_version=version))
    answer = run.fetch()["data"]
    assert [row["instance_id"] for row in answer["data"]] == [0, 0, 3, 3]
    assert "warning" not in answer["meta_info"]
    run.stop()
