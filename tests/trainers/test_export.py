"""``forebay export --to parquet`` in `datasets`, DuckDB and TRL's SFTTrainer."""

import math
from pathlib import Path

import pytest

from tests.cli.conftest import Forebay, forebay
from tests.replay.exporters.export_kit import write_agents
from tests.trainers.conftest import RunScript

__all__ = ["forebay"]


@pytest.mark.trainers
def test_an_export_is_opened_and_trained_on(
    forebay: Forebay, run_script: RunScript, trl_model: str, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    write_agents(tmp_path / "agents.fbr")
    out = tmp_path / "agents.parquet"
    assert forebay("export", tmp_path / "agents.fbr", out, "--to", "parquet", "--min-reward", "1").code == 0
    found = run_script("read_export.py", file=str(out), model=trl_model, folder=str(tmp_path))
    assert (found["num_rows"], found["duckdb"]) == (2, [1, 1.0])
    assert [len(losses) for losses in found["losses"]] == [3, 3]
    assert all(math.isfinite(loss) for losses in found["losses"] for loss in losses)
