"""What docs/trainers.md shows does what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from tests.kit import Json, NativeRun, ServerProcess, make_group

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


class Trainer:
    """What the page's blocks call: it remembers what it was trained on, and what of it is in saved models."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self.trained: list[str] = []
        self.saved: dict[int, list[str]] = {}
        self.logged: dict[int, dict[str, float]] = {}

    def train(self, rows: list[Json]) -> None:
        self.trained += [row["uid"] for row in rows]

    def save_model(self, step: int) -> None:
        self.saved[step] = list(self.trained)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged[step] = numbers

    def send_weights(self, workers: list[str]) -> None:
        """Replaced by the test that has engines."""

    def last_saved_step(self) -> int | None:
        return max(self.saved, default=None)

    def run(self, title: str, run: NativeRun | None = None, **replaced: str) -> None:
        source = BLOCKS[title].replace("http://127.0.0.1:8889", self._url)
        for old, new in replaced.items():
            source = source.replace({"engine": "http://127.0.0.1:30000", "tasks": "tasks.jsonl"}[old], new)
        names = {
            name: getattr(self, name) for name in ("train", "save_model", "last_saved_step", "send_weights", "log")
        }
        exec(compile(source, f"trainers.md: {title}", "exec"), {**names, "run_id": run.run_id if run else ""})


@pytest.fixture
def trainer(server: ServerProcess) -> Trainer:
    return Trainer(server)


def full_run(server: ServerProcess, **settings: Any) -> tuple[NativeRun, list[str]]:
    """A run that has ended, with eight groups, and the uids in their order."""
    run = server.start_run(group_size=2, **settings)
    samples = [sample for number in range(8) for sample in make_group(f"g{number}", [0.0, 1.0], weight_version=2)]
    run.write(*samples)
    run.stop()
    return run, [sample["uid"] for sample in samples]


def test_every_block_is_executed_here() -> None:
    assert len(BLOCKS) == PAGE.count("```python")
    source = Path(__file__).read_text(encoding="utf-8")
    assert [title for title in BLOCKS if f'trainer.run("{title}"' not in source] == []


def test_the_loop(trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"instance_id": f"t{n}", "prompt": [{"role": "user", "content": "?"}], "label": "8"} for n in range(5)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = iter(range(1_000))

    def script(_: ScriptedCall) -> str:
        return "\\boxed{8}" if next(answers) % 2 else "\\boxed{9}"

    with ScriptedEngine(script).in_thread() as engine:
        trainer.run("A loop", engine=engine.url, tasks=str(tmp_path / "tasks.jsonl"))
    assert len(set(trainer.trained)) == len(trainer.trained) == 40
    assert {step: len(uids) for step, uids in trainer.saved.items()} == {1: 32, 2: 40}
    printed = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in printed[1:]) == [f"t{n}" for n in range(5)]


def test_going_on_after_a_crash(server: ServerProcess, trainer: Trainer) -> None:
    run, uids = full_run(server)
    save_model = trainer.save_model

    def crash(step: int) -> None:
        raise MemoryError

    trainer.save_model = crash  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        trainer.run("Resuming after a crash", run)
    trainer.save_model, trainer.trained = save_model, []  # type: ignore[method-assign]
    trainer.run("Resuming after a crash", run)
    assert trainer.trained == uids
    assert list(trainer.saved) == [1, 2]


def test_reading_ahead(server: ServerProcess, trainer: Trainer) -> None:
    run, uids = full_run(server)
    trainer.run("Reading ahead", run)
    assert trainer.trained == uids
    told = run.client.get(f"{run.path}/checkpoints").json()["checkpoints"]
    assert [(checkpoint["step"], checkpoint["num_groups"]) for checkpoint in told] == [(n, 2) for n in range(1, 5)]


def test_an_error_is_told_although_reading_ahead_waits(server: ServerProcess, trainer: Trainer) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("a", [0.0, 1.0]), *make_group("b", [0.0, 1.0]))

    def crash(rows: list[Json]) -> None:
        raise MemoryError

    trainer.train = crash  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        trainer.run("Reading ahead", run)
    assert len(run.read(num_groups=2, wait_s=20)["data"]) == 4


def test_weight_versions(server: ServerProcess, trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = full_run(server)
    trainer.run("Weight versions", run)
    assert "'staleness': {'1': 4}" in capsys.readouterr().out
    assert run.view()["weight_version"] == 3


def test_updating_weights(server: ServerProcess, trainer: Trainer) -> None:
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        run, uids = full_run(server, remote_engine_url=engine.url)
        trainer.run("Updating weights", run)
        assert trainer.trained == uids
        assert [body["model_path"] for body in engine.engine.weight_updates] == ["/models/step-1", "/models/step-2"]
        assert (engine.engine.weight_version, engine.engine.paused) == ("2", None)
    assert run.view()["weight_version"] == 2


def test_weights_that_a_trainer_brings(server: ServerProcess, trainer: Trainer) -> None:
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        run, _ = full_run(server, remote_engine_url=engine.url)
        sent: list[tuple[list[str], str | None]] = []
        trainer.send_weights = lambda workers: sent.append((workers, engine.engine.paused))  # type: ignore[method-assign]
        trainer.run("Weights that a trainer brings", run)
        assert sent == [([engine.url], "retract")]
        assert (engine.engine.weight_version, engine.engine.paused) == ("2", None)


def test_numbers_for_your_log(server: ServerProcess, trainer: Trainer) -> None:
    run, _ = full_run(server)
    trainer.run("Numbers for your log", run)
    assert [numbers["forebay/groups/ready"] for _, numbers in sorted(trainer.logged.items())] == [4.0, 0.0]


def test_asynchronous_trainers(server: ServerProcess, trainer: Trainer) -> None:
    run, uids = full_run(server)
    trainer.run("Asynchronous trainers", run)
    assert trainer.trained == uids
    assert [batch["step"] for batch in run.client.get(f"{run.path}/batches").json()["batches"]] == [1, 2]


def test_writing_samples_from_elsewhere(server: ServerProcess, trainer: Trainer) -> None:
    run = server.start_run(group_size=8)
    trainer.run("Writing samples from elsewhere", run)
    (group,) = run.groups()
    assert [sample["uid"] for sample in run.group(group["group_id"])["samples"]] == [f"mine-{n}" for n in range(4, 12)]
    assert sorted(row["raw_reward"] for row in run.read(num_groups=1, wait_s=20)["data"]) == [0.0] * 7 + [1.0]
