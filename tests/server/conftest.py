"""A run on the shared server for each test that asks for one."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import NativeRun, ServerProcess, SlimeRun


@pytest.fixture
def run(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[NativeRun]:
    """A run with the settings ``RUN`` of the module."""
    run = server.start_run(**getattr(request.module, "RUN", {}))
    yield run
    run.stop()


@pytest.fixture
def slime(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[SlimeRun]:
    run = server.start_slime(request.node.name[:60].partition("[")[0])
    yield run
    run.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
