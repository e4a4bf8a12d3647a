"""Digests of input files: computed once, of regular files only, and of nothing that changes meanwhile."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from forebay.core.settings import Settings
from forebay.server.runs import input_files
from forebay.server.runs.input_files import InputFiles

ROWS = b'{"prompt": "1 + 1"}\n' * 100_000


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[InputFiles]:
    files = InputFiles(Settings(input_roots=[folder]), folder)
    try:
        yield files
    finally:
        await files.aclose()


async def test_a_file_has_the_digest_of_its_bytes_until_it_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS)
    async with opened(tmp_path) as files:
        digests = await asyncio.gather(*(files.digest("rows.jsonl") for _ in range(3)))
        assert digests == [sha256(ROWS).hexdigest()] * 3
        path.write_bytes(ROWS[20:])
        assert await files.digest(str(path)) == sha256(ROWS[20:]).hexdigest()


async def test_what_is_no_readable_file_of_an_allowed_folder_has_none(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    os.mkfifo(allowed / "pipe")  # opening it would wait for ever
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    async with opened(allowed) as files:
        for path in (allowed / "pipe", allowed / "missing", allowed, tmp_path / "rows.jsonl"):
            assert await files.digest(str(path)) == "", path


async def test_a_file_that_changes_while_it_is_read_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS)
    monkeypatch.setattr(input_files, "STEP_BYTES", 1_000)
    async with opened(tmp_path) as files:
        has_begun, add_step = threading.Event(), input_files._add_step

        def step(*args: Any) -> bool:
            has_begun.set()
            return add_step(*args)

        monkeypatch.setattr(input_files, "_add_step", step)
        reading = asyncio.create_task(files.digest("rows.jsonl"))
        await asyncio.to_thread(has_begun.wait)
        await files.digest_within("rows.jsonl", 0.0)
        with path.open("ab") as file:
            file.write(b"{}\n")
        assert await reading == ""
        assert await files.digest("rows.jsonl") == sha256(ROWS + b"{}\n").hexdigest()


async def test_the_loop_turns_while_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.truncate(1 << 27)
    has_turned, add_step = threading.Event(), input_files._add_step

    def step(*args: Any) -> bool:
        assert has_turned.wait(30)
        return add_step(*args)

    monkeypatch.setattr(input_files, "_add_step", step)
    async with opened(tmp_path) as files:
        reading = asyncio.create_task(files.digest("rows.jsonl"))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not reading.done()
        has_turned.set()
        assert len(await reading) == 64
