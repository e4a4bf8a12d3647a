"""A server with the tasks of slime's tests, a stand-in for slime itself, and a run that the function finds by name."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.client import slime
from tests.client import slime_stand_in
from tests.client.slime import tasks
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess


@pytest.fixture(scope="session")
def slime_server(session_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    return session_servers(generators=tasks.write_tasks(tmp_path_factory.mktemp("tasks")))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in slime_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    slime.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", ".").replace("]", "")[:64]


@pytest.fixture
def run(slime_server: ServerProcess, name: str) -> NativeRun:
    """A run that the function finds by its name."""
    return slime_server.start_run(name=name, group_size=2)


@pytest.fixture
def args(slime_server: ServerProcess, name: str) -> Any:
    return slime_stand_in.arguments(slime_server.url, rollout_buffer_name=name)


@pytest.fixture
def exam(tmp_path: Path, args: Any) -> Callable[..., str]:
    """Writes the input of the exam: for each instance the rewards of its samples, None for one that fails."""

    def write(ballast: str = "", **rewards: list[float | None]) -> str:
        head = {"tokens": [1, 2, 3], "extra_info": {"finish_reason": "length"}, "ballast": ballast}
        rows = [{"instance_id": name, "rewards": each, **head} for name, each in rewards.items()]
        path = tmp_path / "exam.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    args.rollout_task_type = "exam"
    return write
