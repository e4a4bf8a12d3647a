"""`forebay generators new`: the file that it writes works as it is."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.engines.scripted import ScriptedEngine
from forebay.generators.discovery.info import GeneratorInfo
from forebay.generators.discovery.inspector import inspect_file
from forebay.generators.discovery.scaffold import write_scaffold
from forebay.generators.process.code_copy import copy_code
from forebay.generators.process.spec import RunSpec
from forebay.server.runs.process import RunProcess


async def check(path: Path) -> GeneratorInfo:
    draft = GeneratorInfo(path=path, source="user", sha256="", status="failed")
    return await inspect_file(draft, working_dir=path.parent, timeout_s=120)


@pytest.mark.parametrize(
    ("task_type", "name"),
    [
        ("my_task", "my_task_generator.py"),
        ("My Task/v2.1", "my_task_v2_1_generator.py"),
        ("2048", "task_2048_generator.py"),
        ("数学", "my_task_generator.py"),
        ("quo\"te's\n\\", "quo_te_s_generator.py"),
    ],
)
async def test_a_scaffold_passes_the_check_whatever_the_task_type(tmp_path: Path, task_type: str, name: str) -> None:
    path = write_scaffold(task_type, tmp_path / "new")
    info = await check(path)
    assert (path.name, info.status, info.task_type, info.imports_base) == (name, "ok", task_type, True)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = write_scaffold("mine", tmp_path)
    path.write_text("my work")
    with pytest.raises(InvalidInput, match=r"mine_generator\.py exists already"):
        write_scaffold("mine", tmp_path)
    assert path.read_text() == "my work"


def test_a_task_type_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="empty"):
        write_scaffold("  ", tmp_path)


async def test_a_scaffold_runs_as_it_is(tmp_path: Path) -> None:
    path = write_scaffold("mine", tmp_path / "tasks")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "label": n}) + "\n" for n in (1, 2)))
    engine = ScriptedEngine(lambda _: "it is 1")
    with slime_buffer() as (buffer_url, written):
        async with engine:
            payload = {"remote_engine_url": engine.url, "remote_buffer_url": buffer_url, "task_type": "mine"}
            payload |= {"input_file": str(rows), "num_repeat_per_sample": "2"}
            copy = copy_code(path, tmp_path / "run")
            spec = RunSpec(str(copy), str(path.parent), payload)
            process = await RunProcess.start(spec, run_dir=tmp_path / "run", working_dir=tmp_path)
            report = await process.wait()
    assert report.is_returned, report
    assert sorted((item["instance_id"], item["reward"]) for item in written) == [(0, 1), (0, 1), (1, 0), (1, 0)]


@contextmanager
def slime_buffer() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The write route of slime's buffer, and what was written to it."""
    written: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            written.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"success": True, "message": "", "data": None}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", written
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
