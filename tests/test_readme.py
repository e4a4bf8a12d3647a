"""The generator, the data and the trainer of README.md do together what it says."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from tests.kit import ServerProcess

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_it_has_a_short_generator_and_a_short_trainer() -> None:
    generator, _, trainer = blocks("python")
    assert len([line for line in generator.splitlines() if line.strip()]) <= 20
    assert len([line for line in trainer.splitlines() if line.strip()]) <= 10


def test_the_agent_is_a_generator() -> None:
    _, agent, _ = blocks("python")
    names: dict[str, object] = {}
    exec(compile(agent, "README.md", "exec"), names)
    assert callable(names["run_rollout"])


def test_the_trainer_reads_what_the_generator_makes(
    make_server: Callable[..., ServerProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator, _, trainer = blocks("python")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums_generator.py").write_text(generator)
    (tmp_path / "sums.jsonl").write_text(blocks("json")[0])
    numbers = iter(range(10))

    def script(call: ScriptedCall) -> str:
        assert call.prompt.startswith("What is 3 + 5?\nPut")
        return "\\boxed{8}" if next(numbers) % 2 else "\\boxed{9}"

    with ScriptedEngine(script).in_thread() as engine:
        server = make_server(generators=tmp_path / "tasks")
        start = {
            "task_type": "sums",
            "name": "sums",
            "input_file": str(tmp_path / "sums.jsonl"),
            "remote_engine_url": engine.url,
        }
        server.client.post("/v1/runs", json={**start, "num_repeat_per_sample": 4}).raise_for_status()
        (tmp_path / "trainer.py").write_text(trainer.replace("http://127.0.0.1:8889", server.url))
        runpy.run_path(str(tmp_path / "trainer.py"))
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    assert sorted(row.split()[-1] for row in rows) == ["0.0", "0.0", "1.0", "1.0"]
