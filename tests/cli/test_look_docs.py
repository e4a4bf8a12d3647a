"""The commands of docs/show.md and docs/export.md work, one after another, on a run of that name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ServerProcess, make_group

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["show.md", "export.md"])
def test_its_commands_run_one_after_another(server: ServerProcess, tmp_path: Path, page: str) -> None:
    pytest.importorskip("pyarrow")
    run = server.start_run(group_size=2, name="sums")
    run.write(*make_group("2+2", [0.0, 1.0], slot=..., tokens=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0]))
    run.write(*make_group("other", [0.0, 1.0]))
    run.take(num_groups=2, step=1)
    group = run.groups()[0]["group_id"]
    slot = run.client.get(f"{run.path}/groups/{group}").json()["samples"][0]["slot"]
    [script] = re.findall(r"^```sh\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FOREBAY_URL": server.url,
    }
    done = subprocess.run(
        ["bash", "-euc", script.replace("2+2 0", f"2+2 {slot}")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    run.stop()
