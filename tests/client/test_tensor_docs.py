"""The code of docs/tensors.md does what the page says."""

import re
import runpy
from pathlib import Path

import pytest

from tests.kit import ServerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "tensors.md").read_text(encoding="utf-8")


def test_its_code_writes_and_reads(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(code)
    told = runpy.run_path(str(script), {"url": server.url, "run_id": server.start_run(group_size=2).run_id})
    assert capsys.readouterr().out.startswith("torch.Size([2, 4]) tensor([-1")
    assert told["tensors"]["tokens"].tolist() == [[11, 12, 13, 14]] * 2
    assert told["tensors"]["logprobs"][0].tolist() == [0.0, 0.0, -0.5, -0.25]
    assert [row["logprobs"] for row in told["plain"]] == [[0.0, 0.0, -0.5, -0.25]] * 2
    assert set(told["tensors"]) == set(re.findall(r"^\| `(\w+)` \| \w+ \| B", PAGE, re.MULTILINE))
    for name, tensor in told["tensors"].items():
        assert f"| `{name}` | {str(tensor.dtype).removeprefix('torch.')} | " in PAGE
