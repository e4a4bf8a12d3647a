"""examples/grpo_loop: what it is given wrongly, and runs of which nothing comes, end in a line that says what to do."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedEngine
from tests.examples.grpo_kit import LOOP, LoopProcess
from tests.kit import ServerProcess, poll_until

LIMIT_S = 180.0
CRASH = 'TASK_TYPE = "crash"\ndef run_rollout(data):\n    raise SystemExit(3)\n'


def run_loop(*arguments: object) -> tuple[int, str]:
    """Exit code and everything that it printed."""
    command = [sys.executable, str(LOOP), *map(str, arguments)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    told = ended.stdout + ended.stderr
    assert "Traceback" not in told, told
    return ended.returncode, told


async def test_an_engine_whose_model_is_no_folder_here_is_told(tmp_path: Path) -> None:
    async with ScriptedEngine(lambda _: "x", model="Someone/A-Model") as engine:
        code, told = await asyncio.to_thread(run_loop, "--dir", tmp_path, "--engine", engine.url + "/")
    assert code == 2
    assert "serves 'Someone/A-Model', which is not a model folder on this machine" in told
    assert "--model-path FOLDER" in told
    assert not any((tmp_path / "models").glob("step-*"))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--num-process", "0"], 2, "must be at least 1 (got 0)"),
        (["--engine", "http://127.0.0.1:99999"], 1, "--engine takes the address of an SGLang"),
        (["--dir", str(LOOP)], 2, "cannot be used: File exists"),
    ],
)
def test_wrong_arguments_are_told(tmp_path: Path, arguments: list[str], code: int, told: str) -> None:
    ended = run_loop("--dir", tmp_path, *arguments)
    assert ended[0] == code
    assert told in ended[1]


@pytest.mark.soak
def test_a_run_that_failed_before_the_first_step_is_started_anew(tmp_path: Path) -> None:
    folder = tmp_path / "loop"
    fail_a_run(tmp_path / "server", folder / "data")
    loop = LoopProcess(folder)
    with loop.running(1) as process:
        told, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, told
    assert [entry["step"] for entry in loop.history()] == [1]


def fail_a_run(directory: Path, data_dir: Path) -> None:
    """Leave a failed run with the loop's name in its data."""
    server = ServerProcess(directory, data_dir=data_dir, max_restarts=0)
    (server.generators / "crash_generator.py").write_text(CRASH)
    server.start()
    try:
        run = server.start_run("crash", name="grpo-loop")
        poll_until(lambda: run.view()["state"] == "failed")
    finally:
        server.close()


@pytest.mark.soak
def test_a_loop_has_its_folder_for_itself_and_tells_why_nothing_comes(tmp_path: Path) -> None:
    loop = LoopProcess(tmp_path, None, "--group-size", "1")
    with loop.running(1) as process:
        assert process.stdout is not None
        assert "Everything is kept in" in process.stdout.readline()
        code, told = run_loop("--dir", tmp_path)
        assert code == 2
        assert f"another loop is running in {tmp_path}" in told
        assert re.search(r"(\d+) groups in a row ended undelivered: \1 invalid", process.stdout.readline())


@pytest.mark.soak
def test_a_loop_whose_run_was_stopped_after_a_step_tells_the_way_out(tmp_path: Path) -> None:
    loop = LoopProcess(tmp_path / "loop")
    with loop.running(1) as process:
        told, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, told
    stop_the_run(tmp_path / "server", loop.folder / "data")
    with loop.running(100) as process:
        told, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, told
    assert "Start over with another --dir" in told
    assert "to resume" not in told


def stop_the_run(directory: Path, data_dir: Path) -> None:
    """Stop the one run in the loop's data."""
    server = ServerProcess(directory, data_dir=data_dir).start()
    try:
        (run,) = server.client.get("/v1/runs").json()["runs"]
        assert server.client.post(f"/v1/runs/{run['run_id']}/stop").json()["state"] == "stopped"
    finally:
        server.close()
