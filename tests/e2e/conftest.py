"""Servers with the tasks of this folder, and rows to run them on."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.e2e import payloads
from tests.kit import ServerProcess

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture
def server(make_server: MakeServer, tmp_path: Path) -> ServerProcess:
    """A server of the test's own: it may be killed, and nobody else's runs are on it."""
    return make_server(generators=Path(shutil.copytree(TASKS, tmp_path / "tasks")), start_wait_s=60)


@pytest.fixture
def make_payload(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``payloads.make_payload`` with the test's folder."""
    return functools.partial(payloads.make_payload, tmp_path)
