"""What docs/evaluation.md shows is run as it is, against a server and an engine at other addresses."""

import re
import runpy
import shlex
from collections import Counter
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from tests.cli.conftest import Forebay
from tests.kit import ServerProcess, poll_until

PAGE = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def rows(name: str) -> str:
    return "".join(f'{{"instance_id": {n}, "prompt": "{name} {n}: 3+4=", "label": "7"}}\n' for n in range(2))


def test_the_commands_and_the_trainer_of_the_page_run(
    server: ServerProcess, forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counts: Counter[str] = Counter()

    def script(call: ScriptedCall) -> str:
        counts[call.prompt] += 1
        return f"\\boxed{{{6 + counts[call.prompt] % 2}}}"

    for name in ("train", "exam", "aime"):
        Path(f"{name}.jsonl").write_text(rows(name))
    [aime] = blocks("toml")
    Path("aime.toml").write_text(aime.replace('"aime.jsonl"', f'"{tmp_path / "aime.jsonl"}"'))
    [(start, status), (held,), (export,)] = [block.strip().splitlines() for block in blocks("sh")]
    with ScriptedEngine(script).in_thread() as engine:

        def run(line: str, *more: object) -> str:
            words = shlex.split(line.partition(" #")[0].replace("http://127.0.0.1:30000", engine.url))
            outcome = forebay(*words[1:], *more, "--url", server.url)
            assert outcome.code == 0, outcome
            return outcome.out

        Path("run.toml").write_text(
            f'task_type = "math"\ninput_file = "{tmp_path / "train.jsonl"}"\ngroup_size = 2\n'
            "num_process = 1\n"  # so that the answers of a group are one after the other
        )
        run(f"forebay stop {run(held, '--engine-url', engine.url, '--evaluate', 'aime.toml').strip()}")
        run(start)
        Path("trainer.py").write_text(blocks("python")[0].replace("http://127.0.0.1:8889", server.url))
        runpy.run_path("trainer.py")
        # The last evaluation, which no update ended.
        shown = poll_until(lambda: text if "finished: 16 of 16 rollouts" in (text := run(status)) else "")
        assert re.search(
            r"step 19, exam, weights 20: finished: .* · mean 0\.500 \[.* · pass@1 .* · pass@8 1\.000", shown
        )
        run(export)
        assert Path("exam.fbr").exists()
