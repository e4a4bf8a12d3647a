"""examples/grpo_loop: the curve says what it shows, in the picture and in the terminal."""

import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from tests.examples.grpo_kit import LOOP

REWARDS = [0.35, 0.4, None, 0.55, 0.62]
ENTRY = {"num_samples": 64, "weight_versions": [3], "groups": [], "seconds": 1.5}


@pytest.fixture(scope="module")
def history() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_history", LOOP.with_name("history.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Five steps, in one of which nothing arrived."""
    path = tmp_path / "history.jsonl"
    told = [{**ENTRY, "step": step, "reward": reward} for step, reward in enumerate(REWARDS, 1)]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in told))
    return path


def test_the_picture_has_a_title_and_axes_with_what_they_count(history: ModuleType, file: Path) -> None:
    picture = file.with_name("reward.svg")
    history.save_picture(history.History(file), picture)
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", picture.read_text())
    assert {
        "GRPO on sums: mean reward by step",
        "optimiser step",
        "mean reward of its samples (0 to 1)",
    } <= set(texts)
    assert {"0.0", "1.0", "1", "5"} <= set(texts), "both axes have ticks"
    history.save_picture(history.History(file), file.with_name("reward.png"))
    assert file.with_name("reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("has_begun", [True, False])
def test_the_curve_in_the_terminal_has_them_too(history: ModuleType, file: Path, has_begun: bool) -> None:
    if not has_begun:
        file.unlink()
    shown = io.StringIO()
    Console(file=shown, width=100).print(history.draw(history.History(file), "reading"))
    lines = shown.getvalue().splitlines()
    assert "GRPO on sums: mean reward by step" in lines[0]
    told = "\n".join(lines)
    assert "mean reward of its samples (0 to 1)" in told
    assert f"optimiser step: {'1 … 5' if has_begun else 'none yet'}" in told
    ticks = [line.strip("│ ")[:3] for line in lines if "┤" in line or "└" in line]
    assert [tick for tick in ticks if tick[0].isdigit()] == ["1.0", "0.5", "0.0"]
