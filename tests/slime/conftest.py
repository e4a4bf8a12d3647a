"""What the trainer's tests begin with: slime-only generator files, an input file, and an engine that counts."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slime.engine import CountingEngine

INSTANCES = [f"task-{number}" for number in range(6)]


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generators folder with the files of ``tests/slime/tasks``."""
    return Path(shutil.copytree(Path(__file__).parent / "tasks", tmp_path_factory.mktemp("tasks") / "tasks"))


@pytest.fixture
def engine() -> Iterator[CountingEngine]:
    with CountingEngine() as engine:
        yield engine


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    """One row per instance; the prompt is the id, so that an engine's counts are the instances'."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"instance_id": i, "prompt": i}) + "\n" for i in INSTANCES))
    return path
