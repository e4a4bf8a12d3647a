"""No code of a model folder runs: not for a chat template, and not in the tiny engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.core.errors import ForebayError
from forebay.engines.chat_template import load_template

CODE = """
from pathlib import Path
Path({marker!r}).write_text("owned")
from transformers import PreTrainedTokenizerFast
class Evil(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(CODE.format(marker=str(tmp_path / "owned")))
    evil = "evil.Evil"
    mapped = {"AutoTokenizer": [evil, evil], "AutoConfig": evil, "AutoModelForCausalLM": evil}
    config = {"tokenizer_class": "Evil", "auto_map": mapped, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": mapped}))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "WordLevel"}}))
    return folder


def test_a_chat_template_is_read_and_no_code_beside_it(folder: Path) -> None:
    with pytest.raises(ForebayError):
        load_template(folder)
    assert not (folder.parent / "owned").exists()


def test_the_tiny_engine_runs_no_code_of_its_model(folder: Path) -> None:
    command = [sys.executable, "-m", "forebay.server.cli", "engine", "tiny", "--port", "0", "--model-path", str(folder)]
    ended = subprocess.run(command, check=False, input="y\ny\n", capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert not (folder.parent / "owned").exists(), ended.stderr
