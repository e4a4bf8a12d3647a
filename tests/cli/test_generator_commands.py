"""``generators list``, ``check`` and ``new``, without a server."""

import json
from pathlib import Path

import pytest

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


def test_new_never_overwrites(forebay: Forebay) -> None:
    forebay("generators", "new", "mine", "--folder", "tasks")
    again = forebay("generators", "new", "mine", "--folder", "tasks")
    assert again.code == 2
    assert "is there already" in again.err


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
