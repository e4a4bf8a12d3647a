"""The agents of examples/, each as its README starts it: a real server, its gateway, and a scripted engine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedEngine, ThreadedEngine
from tests.conftest import MakeServer
from tests.examples import agent_scripts
from tests.kit import NativeRun, ServerProcess, poll_until

ROOT = Path(__file__).parents[2] / "examples"
LIMIT_S = 240.0
EXAMPLES = {
    "openai_agents": "openai_agents/products.jsonl",
    "anthropic_agent": "anthropic_agent/countries.jsonl",
    "smolagents": "smolagents_agent/letters.jsonl",
    "shell_agent": "shell_agent/chores.jsonl",
    "mcp_agent": "mcp_agent/orders.jsonl",
}
"""The data of each, by task type."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(agent_scripts.answer).in_thread() as engine:
        yield engine


@pytest.fixture(scope="module")
def runs(
    module_servers: MakeServer, engine: ThreadedEngine, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, NativeRun]:
    """All of them, started at once on one server."""
    folder = tmp_path_factory.mktemp("generators")
    for path in [file for data in EXAMPLES.values() for file in (ROOT / data).parent.glob("*.py")]:
        shutil.copy(path, folder)
    server: ServerProcess = module_servers(generators=folder, start_wait_s=60)
    started = {"group_size": 1, "remote_engine_url": engine.url, "sampling_params": {"max_tokens": 256}}
    return {
        name: server.start_run(name, input_file=str(ROOT / data), min_valid_group_size_ratio=0, **started)
        for name, data in EXAMPLES.items()
    }


def samples_of(run: NativeRun, num_groups: int) -> list[list[dict[str, Any]]]:
    """The stored samples of each group of a run, once it has come to its end."""
    poll_until(lambda: run.view()["state"] not in ("validating", "running"), LIMIT_S)
    view = run.view()
    assert view["state"] == "finished", view
    groups = [run.client.get(f"{run.path}/groups/{group['group_id']}?bodies=true").json() for group in run.groups()]
    assert len(groups) == num_groups
    return [[stored["body"] for stored in group["samples"]] for group in groups]


def instances(name: str) -> list[Any]:
    return [json.loads(line)["instance_id"] for line in (ROOT / EXAMPLES[name]).read_text().splitlines()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_agent_solves_its_tasks_and_is_recorded(runs: dict[str, NativeRun], name: str) -> None:
    groups = samples_of(runs[name], len(instances(name)))
    for samples in groups:
        assert [sample.get("error") for sample in samples] == [None] * len(samples)
        assert {sample["reward"] for sample in samples} == {1.0}
        assert len({sample["rollout_id"] for sample in samples}) == 1
        for sample in samples:
            assert "retokenized" not in sample
            assert len(sample["tokens"]) == len(sample["loss_mask"]) == len(sample["logprobs"])
            assert sum(sample["loss_mask"]) > 0


def test_a_second_agent_gives_a_sample_of_its_own(runs: dict[str, NativeRun]) -> None:
    for samples in samples_of(runs["openai_agents"], 2):
        systems = sorted(str(sample["messages"][0]["content"]) for sample in samples)
        assert systems == ["Say whether the sum is right: yes or no.", "Use your tools."]
        assert sorted(sample.get("fork", 0) for sample in samples) == [0, 1]


@pytest.mark.parametrize(
    "path", sorted(path for data in EXAMPLES.values() for path in (ROOT / data).parent.glob("*.py"))
)
def test_the_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
