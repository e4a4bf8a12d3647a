"""A data directory belongs to one server, and to the format that it was written in."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.buffer.store.data_dir import FORMAT_VERSION
from forebay.buffer.store.journal import JournalStore
from forebay.core.errors import StorageFailed


async def test_second_server_on_the_same_directory_is_refused_by_name(tmp_path: Path) -> None:
    async with JournalStore(tmp_path):
        with pytest.raises(StorageFailed, match=f"{tmp_path}.*another process") as caught:
            await JournalStore(tmp_path).__aenter__()
        assert "--data-dir" in caught.value.hint
    async with JournalStore(tmp_path) as store:
        assert await store.load_runs() == []


def run_program(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


async def test_another_process_is_refused_too(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom forebay.buffer.store.journal import JournalStore\n"
        "asyncio.run(JournalStore(Path(sys.argv[1])).__aenter__())"
    )
    async with JournalStore(tmp_path):
        done = await asyncio.to_thread(run_program, program, str(tmp_path))
    assert done.returncode != 0
    assert f"the data directory {tmp_path} cannot be used: another process is using it" in done.stderr


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
async def test_another_format_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    async with JournalStore(tmp_path):
        pass
    (tmp_path / "format").write_text(f"forebay data {version}\n")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(StorageFailed, match=f"{tmp_path}.*format {version}") as refused:
        await JournalStore(tmp_path).__aenter__()
    assert "--data-dir" in refused.value.hint
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


async def test_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("PostgreSQL 16")
    with pytest.raises(StorageFailed, match="PostgreSQL 16"):
        await JournalStore(tmp_path).__aenter__()


async def test_path_that_cannot_be_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailed, match="cannot be used"):
        await JournalStore(tmp_path / "file").__aenter__()


async def test_refused_opening_leaves_no_lock_and_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "format").write_text("nonsense")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageFailed):
        await JournalStore(tmp_path).__aenter__()
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "format").unlink()
    async with JournalStore(tmp_path) as store:
        assert store.stats().location == str(tmp_path)
