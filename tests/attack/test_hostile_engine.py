"""What an engine answers that is no answer fails the call, and is nobody's reward; everything else goes on."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.hostile_engine import (
    ABORTED,
    ENDLESS,
    HEADS,
    HEALTHY,
    STREAM_MODES,
    WHOLE_MODES,
    HostileEngine,
    hostile_engine,
)
from tests.conftest import MakeServer
from tests.generators.agent_kit import start, stored
from tests.kit import ServerProcess

LIMIT_BYTES = 2 << 20
UNHANDLED = ("Traceback", "Exception in ASGI", "never retrieved", "Unhandled")


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = shutil.copytree(Path(__file__).parent / "hostile_tasks", tmp_path_factory.mktemp("tasks") / "hostile")
    return module_servers(generators=tasks, max_engine_reply_bytes=LIMIT_BYTES)


@pytest.fixture(scope="module")
def sglang() -> Iterator[HostileEngine]:
    with hostile_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def other() -> Iterator[HostileEngine]:
    with hostile_engine(is_sglang=False) as engine:
        yield engine


def outcomes_of(
    server: ServerProcess, engine: HostileEngine, folder: Path, task_type: str, way: str, modes: list[str]
) -> dict[str, str]:
    """The outcome of one rollout for each mode."""
    rows = [{"do": mode, "prompt": f"do: {mode}", "label": "1"} for mode in modes]
    run = start(server, folder, task_type, engine.url, rows, way=way, max_attempts=1, num_process=48)
    samples = {name: sample for name, (sample,) in stored(run).items()}
    rewarded = {name: sample for name, sample in samples.items() if sample.get("reward") is not None}
    assert rewarded.keys() == {HEALTHY} & set(modes), rewarded
    (path,) = (server.data_dir / "runs" / run.run_id).glob("*/run.log")
    log = path.read_text()
    assert not [line for line in log.splitlines() if any(each in line for each in UNHANDLED)], log
    assert set(samples) == set(modes)
    return {name: sample["outcome"] for name, sample in samples.items()}


def assert_all_failed(outcomes: dict[str, str], server: ServerProcess) -> None:
    assert outcomes.pop(HEALTHY) == "ok"
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome != "engine_failure"}
    assert not wrong
    assert not [each for each in UNHANDLED if each in server.log()], server.log()


@pytest.mark.parametrize(("way", "before"), [("thread_whole", ""), ("async_whole", ""), ("async_whole", ABORTED)])
def test_a_whole_reply_that_is_none_is_a_failure_of_the_engine(
    server: ServerProcess, sglang: HostileEngine, tmp_path: Path, way: str, before: str
) -> None:
    modes = [*(before + mode for mode in WHOLE_MODES), HEALTHY]
    assert_all_failed(outcomes_of(server, sglang, tmp_path, "hostile", way, modes), server)


@pytest.mark.parametrize("way", ["thread_stream", "async_stream"])
def test_a_stream_that_is_none_is_a_failure_of_the_engine(
    server: ServerProcess, sglang: HostileEngine, tmp_path: Path, way: str
) -> None:
    modes = [*STREAM_MODES, HEALTHY]
    assert_all_failed(outcomes_of(server, sglang, tmp_path, "hostile", way, modes), server)


def test_so_it_is_with_an_engine_of_another_make(server: ServerProcess, other: HostileEngine, tmp_path: Path) -> None:
    outcomes = outcomes_of(server, other, tmp_path, "hostile", "async_whole", [*WHOLE_MODES, HEALTHY])
    assert_all_failed(outcomes, server)


@pytest.mark.parametrize(("way", "before"), [("chat", ""), ("chat", ABORTED), ("messages", ""), ("responses", "")])
def test_so_it_is_for_agents_in_every_protocol(
    server: ServerProcess, sglang: HostileEngine, tmp_path: Path, way: str, before: str
) -> None:
    modes = [*(before + mode for mode in WHOLE_MODES), HEALTHY]
    assert_all_failed(outcomes_of(server, sglang, tmp_path, "hostile_agent", way, modes), server)


@pytest.mark.parametrize("way", ["chat_stream", "messages_stream", "responses_stream"])
def test_and_so_are_their_streams(server: ServerProcess, sglang: HostileEngine, tmp_path: Path, way: str) -> None:
    outcomes = outcomes_of(server, sglang, tmp_path, "hostile_agent", way, [*STREAM_MODES, HEALTHY])
    assert_all_failed(outcomes, server)


NO_JSON = ["html", "bytes", "truncated", "nan", "no_utf8", "deep", "array", "null", "empty", *HEADS, ENDLESS]
"""What is wrong wherever an object is expected."""


@pytest.mark.parametrize("way", ["completions", "tokens"])
def test_what_is_not_recorded_is_held_against_its_form_too(
    server: ServerProcess, sglang: HostileEngine, tmp_path: Path, way: str
) -> None:
    outcomes = outcomes_of(server, sglang, tmp_path, "hostile_agent", way, NO_JSON)
    assert set(outcomes.values()) == {"engine_failure"}, outcomes
    assert not [each for each in UNHANDLED if each in server.log()], server.log()
