"""examples/slime: its trainer and its generator, which know nothing of Forebay, work through the server."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from tests.kit import ServerProcess

EXAMPLE = Path(__file__).parents[1] / "examples" / "slime"


def test_the_example_trains_to_the_end_and_remembers_what_is_finished(
    make_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    answers: Counter[str] = Counter()

    def script(call: ScriptedCall) -> str:
        answers[call.prompt] += 1
        return "x" * answers[call.prompt]

    with ScriptedEngine(script).in_thread() as engine:
        server = make_server(generators=Path(shutil.copytree(EXAMPLE, tmp_path / "slime")))
        arguments = [
            "--buffer-url",
            server.url,
            "--engine-url",
            engine.url,
            "--poll-s",
            "0.1",
            "--group-timeout-s",
            "15",
        ]
        command = [sys.executable, str(EXAMPLE / "train.py"), *arguments]
        trained = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert trained.returncode == 0, trained.stderr
    rows = [json.loads(line) for line in (EXAMPLE / "questions.jsonl").read_text().splitlines()]
    finished = json.loads((tmp_path / "checkpoint.json").read_text())
    assert sorted(finished) == sorted(row["instance_id"] for row in rows)
    assert "rewards [" in trained.stdout
    assert "-0.5" in trained.stdout
    assert f"{len(rows)} groups are finished" in trained.stdout
