"""``generators list``, ``check`` and ``new``, without a server."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from forebay.generators import math_generator
from tests.cli.conftest import Forebay

WITH_HOOK = 'TASK_TYPE = "hooked"\ndef run_rollout(data): ...\ndef filter_item(item, task_type):\n    return True\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


def test_a_new_generator_passes_its_check_and_is_found_where_it_was_written(forebay: Forebay) -> None:
    written = forebay("generators", "new", "my-task")
    assert written.code == 0
    path = written.out.strip()
    checked = forebay("generators", "check", path)
    assert checked.code == 0, checked
    assert "my-task" in checked.out
    assert "my-task" in forebay("generators", "list").out


def printed_commands(told: str) -> list[list[str]]:
    """The commands in what ``generators new`` says to do next, without how the command line itself is called."""
    lines = re.findall(r"^(?:check|serve) it: (.*)$", told, re.MULTILINE)
    commands = [shlex.split(line) for line in lines]
    assert all(Path(command[0]).name == "forebay" for command in commands)
    return [command[1:] for command in commands]


def serve_as_printed(arguments: list[str]) -> list[str]:
    """The task types that a server started so has."""
    command = [sys.executable, "-m", "forebay.server.cli", *arguments]
    environ = {**os.environ, "FOREBAY_PORT": "0"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        infos = httpx.get(f"{url}/v1/generators", timeout=60).json()["generators"]
        process.terminate()
    return [info["task_type"] for info in infos if info["status"] == "ok"]


@pytest.mark.parametrize("place", ["elsewhere", "checkout", "folder of a name with a space"])
def test_what_new_says_to_do_next_works_as_it_stands(forebay: Forebay, tmp_path: Path, place: str) -> None:
    package = Path(math_generator.__file__).parent
    before = sorted(package.iterdir())
    if place == "checkout":
        (tmp_path / "generators").symlink_to(package)
    given = ["--folder", "my own tasks"] if "space" in place else []
    written = forebay("generators", "new", "next-one", *given)
    assert written.code == 0, written
    where = {"elsewhere": "generators", "checkout": "my_tasks"}.get(place, "my own tasks")
    assert written.out == f"{where}/next_one_generator.py\n"
    assert sorted(package.iterdir()) == before
    check, serve = printed_commands(written.err)
    checked = forebay(*check)
    assert checked.code == 0, checked
    assert "next-one" in serve_as_printed(serve)


def test_new_leaves_the_package_of_a_checkout_alone(forebay: Forebay, tmp_path: Path) -> None:
    (tmp_path / "generators").symlink_to(Path(math_generator.__file__).parent)
    refused = forebay("generators", "new", "mine", "--folder", "generators")
    assert refused.code == 2
    assert "generators is Forebay's own package" in refused.err
    assert not (tmp_path / "generators" / "mine_generator.py").exists()


def test_new_never_overwrites(forebay: Forebay) -> None:
    forebay("generators", "new", "mine", "--folder", "tasks")
    again = forebay("generators", "new", "mine", "--folder", "tasks")
    assert again.code == 2
    assert "exists already" in again.err


def test_check_tells_who_answers_each_hook(forebay: Forebay, folder: Path) -> None:
    file = folder / "any_name.py"
    file.write_text(WITH_HOOK)
    told = json.loads(forebay("generators", "check", file, "--json").out)
    assert told["answered_by"]["filter_item"][0] == "file any_name.py"
    assert told["answered_by"]["is_valid_group"] == ["built-in"]
    assert "file any_name.py" in forebay("generators", "check", file).out


def test_check_of_a_broken_file_shows_the_traceback_and_fails(forebay: Forebay, folder: Path) -> None:
    file = folder / "broken_generator.py"
    file.write_text('TASK_TYPE = "broken"\nimport nothing_of_this_name\n')
    outcome = forebay("generators", "check", file)
    assert outcome.code == 1
    assert "No module named 'nothing_of_this_name'" in outcome.out
    assert "Traceback" in outcome.out


def test_check_of_a_file_that_is_not_there_is_wrong_usage(forebay: Forebay) -> None:
    assert forebay("generators", "check", "nowhere.py").code == 2


def test_check_of_a_folder_says_what_looks_at_one(forebay: Forebay, folder: Path) -> None:
    outcome = forebay("generators", "check", folder)
    assert outcome.code == 2
    assert f"{folder} is a folder" in outcome.err
    assert "generators list" in outcome.err


def test_list_shows_what_is_replaced_failed_and_skipped_with_the_remedy(forebay: Forebay, folder: Path) -> None:
    (folder / "my_generator.py").write_text('TASK_TYPE = "math"\ndef run_rollout(data): ...\n')
    (folder / "half_generator.py").write_text('TASK_TYPE = "half"\n')
    (folder / "misnamed.py").write_text('TASK_TYPE = "misnamed"\ndef run_rollout(data): ...\n')
    (folder / "hooked_generator.py").write_text(WITH_HOOK)
    told = forebay("generators", "list", "--generators", folder).out
    assert "replaced by" in told
    assert "run_rollout is missing" in told
    assert "skipped: name" in told
    assert "filter_item by file hooked_generator.py" in told
    listed = json.loads(forebay("generators", "list", "--generators", folder, "--json").out)["generators"]
    assert {info["status"] for info in listed} == {"ok", "failed", "skipped"}
