"""``forebay export --to atif`` validates against Harbor's own models, and Phoenix reads it."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.conftest import Forebay, forebay
from tests.replay.exporters.export_kit import write_agents

__all__ = ["forebay"]


@pytest.mark.environments
def test_harbor_and_phoenix_read_every_trajectory(forebay: Forebay, environment_python: str, tmp_path: Path) -> None:
    write_agents(tmp_path / "agents.fbr")
    assert forebay("export", tmp_path / "agents.fbr", tmp_path / "out", "--to", "atif").code == 0
    script = Path(__file__).with_name("read_atif.py")
    done = subprocess.run(
        [environment_python, script, tmp_path / "out"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["unchanged"] == [True] * 6
    assert found["traces"] == 6  # a fork is in the trace of its rollout
    kinds = Counter(found["kinds"])
    assert (kinds["LLM"], kinds["TOOL"]) == (5, 4)
