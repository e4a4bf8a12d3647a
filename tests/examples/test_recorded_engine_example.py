"""examples/recorded_engine, as its README says: recorded once, then tested without an engine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from tests.kit import first_line

FOLDER = Path(__file__).parents[2] / "examples/recorded_engine"
QUESTION = "What is 17 * 24?"


def multiplies(call: ScriptedCall) -> Reply:
    if call.messages[-1]["role"] == "tool":
        return Reply(text=f"It is {call.messages[-1]['content']}.")
    function = {"name": "multiply", "arguments": json.dumps({"a": 17, "b": 24})}
    return Reply(tool_calls=[{"id": "c1", "type": "function", "function": function}])


def test_the_agent_is_tested_on_what_was_recorded(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    with ScriptedEngine(multiplies).in_thread() as engine:
        command = ["engine", "record", str(tmp_path / "calls.fbr"), "--upstream", engine.url, "--port", "0", "--json"]
        recorder = subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.server.cli", *command], stdout=subprocess.PIPE, text=True
        )
        assert recorder.stdout is not None
        with recorder.stdout:
            try:
                url = json.loads(first_line(recorder.stdout, 60))["url"]
                asked = [sys.executable, "agent.py", url, QUESTION]
                said = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
            finally:
                recorder.terminate()
            assert recorder.wait(30) == 0
    assert said.stdout == "It is 408.\n"
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_agent.py"]
    outcome = subprocess.run(tested, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert outcome.returncode == 0, outcome.stdout
    # One word more in the prompt, and the test says which.
    agent = (tmp_path / "agent.py").read_text()
    (tmp_path / "agent.py").write_text(agent.replace('"content": question}', '"content": question + "!"}'))
    outcome = subprocess.run(tested, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert outcome.returncode == 1
    assert f'messages[0].content differs: recorded "{QUESTION}", now "{QUESTION}!"' in outcome.stdout.replace("\\", "")


def run_tests(folder: Path, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        *options,
        str(folder),
    ]
    ended = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """The example as it comes."""
    return shutil.copytree(FOLDER, tmp_path / "example", ignore=shutil.ignore_patterns(".*", "__pycache__"))


def test_it_comes_with_its_recording(shipped: Path) -> None:
    before = (shipped / "calls.fbr").read_bytes()
    assert "2 passed" in run_tests(shipped)
    assert (shipped / "calls.fbr").read_bytes() == before


def test_its_recording_is_made_again_without_a_gpu(shipped: Path) -> None:
    (shipped / "calls.fbr").unlink()
    command = [sys.executable, str(shipped / "engine.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        try:
            url = first_line(engine.stdout, 60).strip()
            assert "2 passed" in run_tests(shipped, "--record-engine", url)
        finally:
            engine.terminate()
    assert "2 passed" in run_tests(shipped)
