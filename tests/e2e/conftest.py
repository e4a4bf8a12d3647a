"""Servers with the tasks of this folder, and rows to run them on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess

TASKS = Path(__file__).parent / "tasks"
GROUP_SIZE = 8


@pytest.fixture
def server(make_server: MakeServer, tmp_path: Path) -> ServerProcess:
    """A server of the test's own: it may be killed, and nobody else's runs are on it."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for task in TASKS.glob("*.py"):
        (folder / task.name).write_text(task.read_text())
    return make_server(generators=folder, start_wait_s=60)


@pytest.fixture
def make_payload(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Writes a file of rows, and makes the body of the start that runs them as slime's client sends it."""

    def make(engine_url: str, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        payload = {
            "task_type": "parity",
            "input_file": str(path),
            "remote_engine_url": engine_url,
            "num_process": "16",
            "num_epoch": "1",
            "num_repeat_per_sample": str(GROUP_SIZE),
            "max_tokens": "16",
            "sampling_params": {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0},
            "tokenizer_path": "",
        }
        return payload | changes

    return make


def numbered_rows(count: int) -> list[dict[str, Any]]:
    """Rows whose prompt is their id."""
    return [{"instance_id": f"row-{n}", "prompt": f"row-{n}"} for n in range(count)]
