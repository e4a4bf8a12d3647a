"""Engines that go away in the middle of rollouts, on a real server: for a while, or for good."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.conftest import MakeServer
from tests.generators.agent_kit import LIMIT_S, start, stored
from tests.kit import NativeRun, ServerProcess, poll_until

HIDING = ("swallow", "time_out")
"""Rollout functions that hide the failure of a call."""
AGENTS = ("wait", "give_up", "answer_at_once", "command")
WALL_S = 15
OUTAGES: dict[str, dict[str, float]] = {
    # The group's last slot is one that no rollout can be started for.
    "endless": {"engine_wait_s": 15, "max_attempts": 2},
    "passing": {"group_timeout_seconds": 60, "max_attempts": 3},
}


class LeavingEngine:
    """An engine that answers one call, and is away from then on."""

    def __init__(self, stack: ExitStack) -> None:
        self.threaded: ThreadedEngine = stack.enter_context(ScriptedEngine(self._answer).in_thread())

    def _answer(self, call: ScriptedCall) -> str:
        if call.number == 0:
            self.threaded.engine.available = False
        return "an answer"


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = shutil.copytree(Path(__file__).parent / "outage_tasks", tmp_path_factory.mktemp("outages") / "tasks")
    return module_servers(generators=tasks, start_wait_s=60)


@pytest.fixture(scope="module")
def runs(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], tuple[NativeRun, LeavingEngine]]]:
    """All runs by their outage and what their rollouts do, started at once, each with an engine of its own."""
    with ExitStack() as stack:

        def begin(do: str, payload: dict[str, Any]) -> tuple[NativeRun, LeavingEngine]:
            engine, folder = LeavingEngine(stack), tmp_path_factory.mktemp(do)
            told = {"group_size": 3, "num_process": 2, "wall_s": WALL_S, "do": do, **payload}
            return start(server, folder, "outages", engine.threaded.url, [{"do": "q"}], **told), engine

        kinds = {"endless": ("twice", *HIDING, *AGENTS), "passing": ("wait", "give_up", "command")}
        yield {(outage, do): begin(do, OUTAGES[outage]) for outage, names in kinds.items() for do in names}


@pytest.mark.parametrize("do", ["twice", *HIDING, *AGENTS])
def test_without_an_engine_every_group_ends_and_nothing_has_a_reward(runs: Any, do: str) -> None:
    run, _ = runs["endless", do]
    samples = stored(run)["q"]
    view = run.view()
    assert (view["groups"]["open"], view["groups"]["discarded"]) == (0, 1)
    assert {sample["outcome"] for sample in samples} == {"environment_failure"}
    assert len(samples) == view["outcomes"]["environment_failure"] == 2
    assert view["rewards"]["num"] == 0
    assert all("no engine answered" in sample["error"]["message"] for sample in samples)


def test_the_time_of_an_agent_is_paused_while_no_engine_answers(runs: Any) -> None:
    passing = [runs["passing", do] for do in ("wait", "give_up", "command")]
    for run, _ in passing:
        poll_until(lambda run=run: run.view()["is_waiting_for_engine"], LIMIT_S)
    with pytest.raises(AssertionError, match="not within"):
        poll_until(lambda: sum(sum(run.view()["outcomes"].values()) for run, _ in passing), 1.5 * WALL_S)
    assert [run.view()["groups"]["open"] for run, _ in passing] == [1] * 3
    for _, engine in passing:
        engine.threaded.engine.available = True
    for run, _ in passing:
        samples = [sample for sample in stored(run)["q"] if not sample.get("fork")]
        assert [sample["outcome"] for sample in samples] == ["ok"] * 3
