"""Mode ``repeat``: which epoch takes the place of one that is missing, and that none does which is damaged."""

import re
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from forebay.core.ids import group_id
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, write_generator
from tests.replay.modes_kit import (
    GROUP_SIZE,
    NAME,
    SOURCE,
    Answers,
    counts,
    finished,
    rows_of,
    scripted,
    slots,
    start,
    write_rows,
    write_words,
)
from tests.replay.recordings.recording_kit import damage_body

__all__ = ["forebay"]

Export = Callable[[NativeRun], Path]


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = tmp_path_factory.mktemp("tasks")
    write_words(tasks)
    return module_servers(generators=tasks, start_wait_s=60)


@pytest.fixture
def export(server: ServerProcess, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Export:
    """Puts a run into a file."""
    monkeypatch.setenv("FOREBAY_URL", server.url)

    def export(run: NativeRun) -> Path:
        assert forebay("recording", "export", run.run_id, tmp_path / "words.fbr").code == 0
        return tmp_path / "words.fbr"

    return export


def write_words_without(folder: Path, epochs: Collection[int]) -> None:
    """The generator file, whose rollouts of these epochs fail."""
    fails = f"if client.rollout.epoch in {tuple(epochs)} or"
    write_generator(folder, SOURCE.replace('if "broken" in', f'{fails} "broken" in'), NAME)


def sources_of(run: NativeRun, recorded: dict[str, Json], name: str, num_epoch: int) -> list[Counter[int | str]]:
    """For each epoch of a row, which epochs of the recorded run its samples are from."""
    found = [Counter[int | str]() for _ in range(num_epoch)]
    for row in rows_of(run, num_epoch).values():
        assert row["instance_id"] == name
        replayed_from = row.get("replayed_from")
        source = recorded[replayed_from["uid"]]["epoch"] if replayed_from else "generated"
        found[row["epoch"]][source] += 1
        if replayed_from:
            assert replayed_from["substitute"] is (source != row["epoch"])
            assert row["messages"] == recorded[replayed_from["uid"]]["messages"]
    return found


each_source = pytest.mark.parametrize(
    "is_file", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["run", "file"]
)


@each_source
def test_a_larger_epoch_takes_the_place_of_one_that_has_no_smaller(
    server: ServerProcess, export: Export, tmp_path: Path, is_file: bool
) -> None:
    answers, rows = Answers(), write_rows(tmp_path / "rows.jsonl", ["a"])
    write_words_without(server.generators, (0, 1, 3))
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url, num_epoch=5)
        finished(recorded)
        read = rows_of(recorded, 2)
        assert {row["epoch"] for row in read.values()} == {2, 4}
        write_words(server.generators)
        answers.forget()
        replay = {"source": str(export(recorded)) if is_file else recorded.run_id, "mode": "repeat"}
        run = start(server, rows, engine.url, num_epoch=6, replay=replay)
        view = finished(run)
    assert answers.asked == []
    assert counts(view) == (6 * GROUP_SIZE, 0, 4 * GROUP_SIZE)
    assert sources_of(run, read, "a", 6) == [Counter({source: GROUP_SIZE}) for source in (2, 2, 2, 2, 4, 4)]


@each_source
def test_an_epoch_that_is_damaged_takes_nobodys_place(
    server: ServerProcess, export: Export, tmp_path: Path, is_file: bool
) -> None:
    """Of epoch 1 nothing can be read, and of epoch 2 of a run all but one body, which is generated anew."""
    answers, rows = Answers(), write_rows(tmp_path / "rows.jsonl", ["a"])
    write_words(server.generators)
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url, num_epoch=3)
        finished(recorded)
        read = rows_of(recorded, 3)
        lost = [uid for uid, row in read.items() if row["epoch"] == 1]
        if is_file:
            path = export(recorded)
            damage_body(path, group_id("a", 1))
            source = str(path)
        else:
            source = recorded.run_id
            lost.append(next(uid for uid, row in read.items() if row["epoch"] == 2))
            damage_bodies(server.data_dir, [read[uid]["messages"][-1]["content"] for uid in lost])
        answers.forget()
        run = start(server, rows, engine.url, num_epoch=5, replay={"source": source, "mode": "repeat"})
        view = finished(run)
    num_new = 0 if is_file else 1
    assert len(answers.asked) == num_new
    assert counts(view)[:2] == (5 * GROUP_SIZE - num_new, num_new)
    of_0, of_2 = Counter({0: GROUP_SIZE}), Counter[int | str]({2: GROUP_SIZE - num_new})
    of_2 += Counter({"generated": num_new})
    later = of_2 if is_file else of_0
    assert sources_of(run, read, "a", 5) == [of_0, of_0, of_2, later, later]
    named = re.findall(r"sample (\S+) is not replayed: ", server.log())
    assert Counter(each for each in named if each in read) == Counter(lost)


def test_the_only_epoch_is_used_as_far_as_it_is_whole(server: ServerProcess, tmp_path: Path) -> None:
    answers, rows = Answers(), write_rows(tmp_path / "rows.jsonl", ["a"])
    write_words(server.generators)
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url, num_epoch=2)
        finished(recorded)
        read = rows_of(recorded, 2)
        lost = [next(uid for uid, row in read.items() if row["epoch"] == epoch) for epoch in (0, 1)]
        damage_bodies(server.data_dir, [read[uid]["messages"][-1]["content"] for uid in lost])
        run = start(server, rows, engine.url, num_epoch=4, replay={"source": recorded.run_id, "mode": "repeat"})
        assert counts(finished(run)) == (4 * (GROUP_SIZE - 1), 4, 2 * (GROUP_SIZE - 1))
    assert all(sample["reward"] is not None for sample in slots(run).values())
    part = [Counter({source: GROUP_SIZE - 1, "generated": 1}) for source in (0, 1, 1, 1)]
    assert sources_of(run, read, "a", 4) == part


def damage_bodies(data_dir: Path, texts: Collection[str]) -> None:
    """Flip a bit in the body that has each text."""
    for segment in (data_dir / "segments").glob("*.log"):
        content = bytearray(segment.read_bytes())
        for text in texts:
            for found in re.finditer(re.escape(f'"{text}"').encode(), bytes(content)):
                content[found.start() + 1] ^= 1
        with segment.open("r+b") as file:
            file.write(content)
