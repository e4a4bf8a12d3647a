"""``forebay compare`` of runs of a real server: by their name, and by their file without the server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, make_group, poll_until, write_generator

__all__ = ["forebay"]

STRICT = """
import threading
TASK_TYPE = "strict"
def run_rollout(data):
    threading.Event().wait()
def filter_item(item, task_type):
    return item["extra_info"]["quality"] > 0.5
"""
JUDGE = """
import os
def judged(item):
    os.write(1, b"out of the middle of the judge")
    return item["quality"]
"""

GROUPS = {"good": [0.6, 0.7, 0.8, 0.9], "fair": [0.4, 0.6, 0.7, 0.9], "poor": [0.1, 0.2, 0.3, 0.9]}
"""The qualities of their samples."""


@pytest.fixture
def server(make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServerProcess:
    # `forebay` first: it takes the address away.
    write_generator(tmp_path / "tasks", STRICT, "strict_generator.py")
    server = make_server(generators=tmp_path / "tasks")
    monkeypatch.setenv("FOREBAY_URL", server.url)
    return server


def fill(run: NativeRun) -> None:
    """Two groups go out, each in a step, the filter of the file takes one, and one is short at its deadline."""
    for name, qualities in GROUPS.items():
        samples = zip(make_group(name, [0.0, 1.0, 0.0, 1.0]), qualities, strict=True)
        run.write(*(each | {"extra_info": {"finish_reason": "stop", "quality": quality}} for each, quality in samples))
    run.write(*make_group("short", [0.0], extra_info={"finish_reason": "stop", "quality": 1.0}))
    poll_until(lambda: [group for group in run.groups() if group["reason"] == "timed_out"])
    for step in (1, 2):
        run.take(num_groups=1, step=step)
    assert run.read(num_groups=1)["batch_id"] is None


def test_a_run_is_compared_by_its_name_and_its_file_without_the_server(
    server: ServerProcess, forebay: Forebay, tmp_path: Path
) -> None:
    run = server.start_run(task_type="strict", name="sums", group_size=4, group_timeout_seconds=1)
    fill(run)
    code = ["--code", tmp_path / "tasks" / "strict_generator.py"]
    looser = write_generator(tmp_path / "looser", STRICT.replace("> 0.5", "> 0.25"), "strict_generator.py")

    shown = forebay("compare", "sums", *code)
    assert (shown.code, shown.err) == (0, "")
    assert "4 of 4 groups have their recorded verdict" in shown.out
    first_step = json.loads(forebay("compare", "sums", *code, "--steps", "1", "--json").out)
    assert first_step["self_check"]["num_groups"] == 1

    path = tmp_path / "sums.fbr"
    assert forebay("recording", "export", "sums", path).code == 0
    server.stop()
    document = json.loads(forebay("compare", path, "--code", looser, "--json").out)
    assert document["self_check"]["has_code"] is False
    kept = server.data_dir / "runs" / run.run_id / "start-1" / "code" / "strict_generator.py"
    as_then = json.loads(forebay("compare", path, "--code", kept, "--json").out)["self_check"]
    assert (as_then["has_code"], as_then["num_as_recorded"]) == (True, 4)
    changed = {each["instance_id"]: (each["before"], each["after"]) for each in document["groups"]}
    filtered, delivered = {"state": "discarded", "reason": "filtered"}, {"state": "delivered", "reason": ""}
    assert {name: pair for name, pair in changed.items() if pair[0] != pair[1]} == {"poor": (filtered, delivered)}
    unknown = forebay("compare", "sums")
    assert (unknown.code, "no server answers" in unknown.err) == (1, True)


def test_what_a_reward_function_prints_is_not_part_of_the_document(server: ServerProcess, tmp_path: Path) -> None:
    run = server.start_run(task_type="strict", group_size=4, group_timeout_seconds=1)
    fill(run)
    (tmp_path / "judge.py").write_text(JUDGE)
    arguments = ["compare", run.run_id, "--reward", f"{tmp_path / 'judge.py'}:judged", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "forebay.server.cli", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    document = json.loads(done.stdout)
    assert document["moves"]["rewards"]["num_moved"] == 13
    assert "out of the middle" in done.stderr


def test_a_run_that_is_not_there_is_told_with_those_that_are(server: ServerProcess, forebay: Forebay) -> None:
    server.start_run(task_type="strict", name="sums", group_size=4)
    unknown = forebay("compare", "products")
    assert (unknown.code, "no run 'products'" in unknown.err) == (1, True)
