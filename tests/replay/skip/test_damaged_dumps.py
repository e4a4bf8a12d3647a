"""Dumps that are damaged or foreign: they are put aside, made again, and never opened."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.replay.skip import SkipManager
from tests.replay.skip.skip_kit import Rollouts, config, folder, warnings_of


def damaged_meta(step: Path) -> None:
    (step / "meta.json").write_text("x")


def shorter(step: Path) -> None:
    path = step / "gen_batch.json"
    path.write_bytes(path.read_bytes()[:-1])


def longer(step: Path) -> None:
    with (step / "gen_batch.json").open("ab") as file:
        file.write(b" ")


def without_value(step: Path) -> None:
    (step / "gen_batch.json").unlink()


def without_meta(step: Path) -> None:
    (step / "meta.json").unlink()


def pipe_for_meta(step: Path) -> None:
    (step / "meta.json").unlink()
    os.mkfifo(step / "meta.json")


def a_file(step: Path) -> None:
    shutil.rmtree(step)
    step.write_text("mine")


def dangling(step: Path) -> None:
    shutil.rmtree(step)
    step.symlink_to("nowhere")


def of_another_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("1"), step)


def names_of_other_folders(step: Path) -> None:
    meta = json.loads((step / "meta.json").read_text())
    meta["num_bytes"] = {"../1/gen_batch.json": meta["num_bytes"]["gen_batch.json"]}
    (step / "meta.json").write_text(json.dumps(meta))


DAMAGE = [
    damaged_meta, shorter, longer, without_value, without_meta, pipe_for_meta, a_file, dangling,
    of_another_step, names_of_other_folders,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_or_foreign_is_put_aside_and_made_again(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    for step in (1, 2, 3):
        rollouts.at(step)
    damage(folder(tmp_path) / "2")
    SkipManager.init(config(tmp_path))
    assert [rollouts.at(step)["call"] for step in (1, 2, 3, 1, 2, 3)] == [1, 4, 3, 1, 4, 3]
    assert os.path.lexists(folder(tmp_path) / "2.damaged-1")
    assert "2.damaged-1" in warnings_of(caplog)[-1]
    damage(folder(tmp_path) / "2")
    assert [rollouts.at(step)["call"] for step in (2, 2)] == [5, 5]
    assert os.path.lexists(folder(tmp_path) / "2.damaged-2")


@pytest.mark.parametrize("damage", DAMAGE)
def test_repeat_takes_another_dump_in_place_of_a_damaged_one(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    for step in (1, 2):
        rollouts.at(step)
    damage(folder(tmp_path) / "2")
    SkipManager.init(config(tmp_path, action="repeat"))
    assert [rollouts.at(step)["call"] for step in (2, 3, 2, 3)] == [1, 1, 1, 1]
    assert len(warnings_of(caplog)) in (1, 2)
    assert str(folder(tmp_path) / "2") in caplog.text


def test_what_is_no_folder_of_a_step_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("not_int", "-1", "007", "1.5", "2", "٣"):
        (folder(tmp_path) / name).mkdir(parents=True)
    (folder(tmp_path) / "not_int" / "gen_batch.dp").touch()
    SkipManager.init(config(tmp_path, action="repeat"))
    rollouts = Rollouts()
    assert [rollouts.at(step)["call"] for step in (1, 2, 3)] == [1, 1, 1]
    assert (warnings_of(caplog), (folder(tmp_path) / "not_int" / "gen_batch.dp").exists()) == ([], True)
    SkipManager.init(config(tmp_path))
    assert [rollouts.at(2)["call"] for _ in range(2)] == [2, 2]
    assert warnings_of(caplog) == []
