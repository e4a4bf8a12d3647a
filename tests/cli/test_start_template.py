"""``forebay start --template-path``."""

from pathlib import Path

import pytest

from tests.cli.conftest import Forebay
from tests.kit import ServerProcess


def test_a_folder_that_is_here_is_sent_with_its_whole_path(
    forebay: Forebay, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    monkeypatch.chdir(tmp_path)
    given = ["--task-type", "math", "--group-size", "2", "--input-file", "rows.jsonl", "--template-path", "model"]
    outcome = forebay("start", *given, "--url", server.url)
    assert outcome.code == 1
    assert f"the folder {tmp_path / 'model'} has no tokenizer" in outcome.err
