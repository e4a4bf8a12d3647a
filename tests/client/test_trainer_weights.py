"""A trainer changes the weights of a run's engines."""

from collections.abc import Iterator

import pytest

from forebay.client import AsyncBufferClient, BufferClient
from forebay.core.errors import InvalidInput, PauseExpired
from forebay.engines.scripted import ScriptedEngine, ThreadedEngine
from tests.kit import NativeRun, ServerProcess, poll_until


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        yield engine


@pytest.fixture
def run(server: ServerProcess, engine: ThreadedEngine) -> NativeRun:
    return server.start_run(remote_engine_url=engine.url)


def test_the_server_lets_engines_load_a_folder(client: BufferClient, engine: ThreadedEngine) -> None:
    told = client.update_weights(5, "/models/step-5", "retract")
    assert (told.weight_version, told.mode, told.workers) == (5, "retract", [engine.url])
    assert told.paused_s < 20
    assert engine.engine.weight_updates[-1]["model_path"] == "/models/step-5"
    assert client.stats().weight_version == 5


def test_engines_stand_still_inside_the_block(client: BufferClient, engine: ThreadedEngine) -> None:
    with client.paused_engines("in_place", weight_version=8) as pause:
        assert (pause.mode, pause.workers, engine.engine.paused) == ("in_place", [engine.url], "in_place")
    assert (engine.engine.paused, engine.engine.weight_version) == (None, "8")
    assert client.stats().weight_version == 8


def test_a_block_that_fails_announces_nothing_and_lets_engines_go_on(
    client: BufferClient, engine: ThreadedEngine
) -> None:
    client.set_weight_version(1)
    with pytest.raises(ZeroDivisionError), client.paused_engines(weight_version=9):
        raise ZeroDivisionError
    assert engine.engine.paused is None
    assert client.stats().weight_version == 1


def test_a_block_that_takes_too_long_is_told(client: BufferClient, engine: ThreadedEngine) -> None:
    with pytest.raises(PauseExpired, match=r"after 0\.2 s"), client.paused_engines(limit_s=0.2):
        poll_until(lambda: engine.engine.paused is None)


def test_a_mode_that_there_is_not_is_refused(client: BufferClient) -> None:
    with pytest.raises(InvalidInput, match="mode"):
        client.update_weights(5, "/models/step-5", "now")  # type: ignore[arg-type]


async def test_the_client_that_awaits_does_the_same(run: NativeRun, engine: ThreadedEngine) -> None:
    async with AsyncBufferClient(run.server.url) as client:
        await client.attach(run.run_id)
        assert (await client.update_weights(3, "/models/step-3")).mode == "abort"
        async with client.paused_engines("retract", weight_version=4) as pause:
            assert (pause.workers, engine.engine.paused) == ([engine.url], "retract")
        assert engine.engine.paused is None
        with pytest.raises(ZeroDivisionError):
            async with client.paused_engines(weight_version=9):
                raise ZeroDivisionError
        assert (await client.stats()).weight_version == 4
