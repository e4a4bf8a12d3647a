"""The code that judged a run, in its file: exported when it is asked for, written out, compared, and never believed."""

import errno
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput, StorageFailed
from forebay.replay.recording_schema import CODE, CODE_TABLE
from forebay.replay.recording_writer import RecordingWriter
from forebay.replay.recordings import code_folders, recorded_code
from forebay.replay.recordings.code_folders import plain_files, read_plain, write_code
from forebay.replay.recordings.recording import Recording
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, assert_error, make_group, write_generator
from tests.replay.recordings.recording_kit import group_record, run_record, write_recording
from tests.replay.recordings.test_foreign_files import HUGE, bomb, forge

__all__ = ["forebay"]

STRICT = """
import threading
from limits import LEAST
TASK_TYPE = "strict"
def run_rollout(data):
    threading.Event().wait()
def filter_item(item, task_type):
    return item["extra_info"]["quality"] > LEAST
"""
QUALITIES = {"good": [0.6, 0.9], "poor": [0.1, 0.2]}


@pytest.fixture
def server(make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServerProcess:
    # `forebay` first: it takes the address away.
    tasks = tmp_path / "tasks"
    write_generator(tasks, STRICT, "strict_generator.py")
    (tasks / "limits.py").write_text("LEAST = 0.5\n")
    (tasks / "words").mkdir()
    (tasks / "words" / "list.txt").write_text("é\n")
    (tasks / "words" / "link.txt").symlink_to("/etc/hostname")
    (tasks / ".env").write_text("hidden")
    server = make_server(generators=tasks)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    return server


def judged_run(server: ServerProcess) -> NativeRun:
    run = server.start_run(task_type="strict", group_size=2)
    for name, qualities in QUALITIES.items():
        pairs = zip(make_group(name, [0.0, 1.0], epoch=0), qualities, strict=True)
        run.write(*(each | {"extra_info": {"quality": quality}} for each, quality in pairs))
    run.take(num_groups=1, step=1)
    assert run.read(num_groups=1)["batch_id"] is None
    run.closed(2)
    return run


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_the_code_of_a_run_comes_out_of_its_file_and_judges_as_it_did(
    server: ServerProcess, forebay: Forebay, tmp_path: Path
) -> None:
    run, path, out = judged_run(server), tmp_path / "a.fbr", tmp_path / "code"
    plain = tmp_path / "plain.fbr"
    assert forebay("recording", "export", run.run_id, plain).code == 0
    assert b"LEAST" not in run.client.get(f"{run.path}/recording").content
    outcome = forebay("recording", "export", run.run_id, path, "--code")
    assert (outcome.code, "files of code: 4" in outcome.err) == (0, True), outcome
    assert forebay("recording", "verify", path).code == 0
    assert "start 1: 4 files" in forebay("recording", "show", path).out
    shown = json.loads(forebay("recording", "show", path, "--json").out)
    assert [(each["start"], each["num_files"]) for each in shown["code"]] == [(1, 4)]

    outcome = forebay("recording", "show", path, "--code", out)
    assert (outcome.code, "files of code below" in outcome.err) == (0, True)
    names = {"strict_generator.py", "idle_generator.py", "limits.py", "words/list.txt"}
    assert below(out) == {f"start-1/{name}" for name in names}
    assert (out / "start-1" / "strict_generator.py").read_text() == STRICT
    assert {each.stat().st_mode & 0o077 for each in (out, *out.rglob("*"))} == {0}
    refused = forebay("recording", "show", path, "--code", out)
    assert (refused.code, "exists" in refused.err) == (2, True)
    without = forebay("recording", "show", plain, "--code", tmp_path / "none")
    assert (without.code, "plain.fbr has no code" in without.err, (tmp_path / "none").exists()) == (1, True, False)
    assert_error(run.client.get(f"{run.path}/recording?code=perhaps"), 422, "invalid_input", "code")

    # What was edited since is told, and what was written out judges as then.
    limits = tmp_path / "tasks" / "limits.py"
    limits.write_text("LEAST = 0.25\n")
    outcome = forebay("compare", path, "--code", out / "start-1" / "strict_generator.py", "--json")
    check = json.loads(outcome.out)["self_check"]
    assert (check["has_code"], check["num_as_recorded"], check["num_groups"]) == (True, 2, 2)
    run.stop()
    assert forebay("recording", "diff", path, run.run_id).code == 0
    assert forebay("recording", "diff", path, plain).code == 0
    other = judged_run(server)
    outcome = forebay("recording", "diff", path, other.run_id)
    assert (outcome.code, "\nthe code: limits.py differs" in outcome.out) == (1, True), outcome
    refused_start = server.client.post("/v1/runs", json={"replay": {"source": str(path), "code": "recorded"}})
    assert_error(refused_start, 422, "invalid_input", "replay.code")
    other.stop()


def test_a_run_without_code_is_exported_all_the_same(server: ServerProcess, forebay: Forebay, tmp_path: Path) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("one", [0.0, 1.0]))
    folder = server.data_dir / "runs" / run.run_id / "start-1" / "code"
    folder.rename(folder.with_name("elsewhere"))
    outcome = forebay("recording", "export", run.run_id, tmp_path / "a.fbr", "--code")
    assert (outcome.code, "none: the server has no copy of any" in outcome.err) == (0, True)
    run.stop()


FILES = {"main.py": b"print(1)\n", "lib/one.py": b"one = 1\n", "lib/two.py": "zwei = 'é'\n".encode()}


def write_with_code(path: Path, *more: str) -> None:
    with RecordingWriter(path, run_record()) as writer:
        for start in (1, 2):
            for name, content in FILES.items():
                writer.add_code(start, name, content)
        for name in more:
            writer.add_code(1, name, b"")
        writer.add_group(group_record(1))


def test_a_damaged_file_of_code_is_named_and_the_others_are_written_out(tmp_path: Path, forebay: Forebay) -> None:
    path, out = tmp_path / "a.fbr", tmp_path / "out"
    write_with_code(path)
    content = bytearray(path.read_bytes())
    content[content.index(FILES["lib/one.py"]) + 2] ^= 1  # in its frame: it is too short to be compressed
    at = content.index(b"main.py", content.index(b"main.py") + 1)
    content[at] ^= 1
    path.write_bytes(content)
    with Recording.open(path) as recording:
        places = {each.place for each in recording.verify()}
        whole = {(each.start, each.path) for each in recording.code()}
    assert "the file" in places
    assert len(places) >= 3
    assert len(whole) == 5
    outcome = forebay("recording", "show", path, "--code", out)
    assert outcome.code == 1
    assert outcome.err.count("not written: code") == 2
    assert len(below(out)) == 4
    assert {each.read_bytes() for each in out.rglob("*.py")} == set(FILES.values())


NOT_PATHS = (
    *("../out.py", "/tmp/out.py", "lib/../../out.py", "./out.py", "lib//out.py", "lib/", "", ".", "..", "..\\out.py"),
    *("a\0b.py", ".git/config", "lib/.hidden", "main.pyc", "__pycache__/main.cpython-311.py", "x" * 256),
    *("a/" * 500 + "b.py", "lib", "main.py/x.py", "lib/two.py", 7, None),
)


def test_no_entry_leaves_its_folder_or_takes_the_place_of_another(tmp_path: Path) -> None:
    path, out = tmp_path / "a.fbr", tmp_path / "in" / "out"
    out.parent.mkdir()
    write_with_code(path, *(f"{number}.py" for number in range(len(NOT_PATHS))))
    with closing(sqlite3.connect(path)) as database, database:  # whoever makes a file may leave the rules out
        database.executescript(
            "CREATE TABLE other AS SELECT * FROM code; DROP TABLE code;"
            "CREATE TABLE code (number INTEGER PRIMARY KEY, start, path, num_bytes, checksum, content);"
            "INSERT INTO code SELECT * FROM other; DROP TABLE other;"
        )
    for number, name in enumerate(NOT_PATHS):
        forge(path, CODE, f"number = {number + 7}", path=name)
    with closing(sqlite3.connect(path)) as database, database:  # and say that it has kept them
        database.execute("CREATE INDEX own ON code (start, path)")
        database.execute("PRAGMA writable_schema = ON")
        index = "UPDATE sqlite_master SET name = 'sqlite_autoindex_code_1', sql = NULL WHERE name = 'own'"
        database.execute(index)
        database.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'code'", (CODE_TABLE.strip(),))
    with Recording.open(path) as recording:
        named = [each for each in recording.verify() if each.place.startswith("code ")]
        written = write_code(recording, out)
    assert len(named) == len(written.damage) == len(NOT_PATHS)
    assert sorted(os.listdir(tmp_path)) == ["a.fbr", "in"]
    assert os.listdir(out.parent) == ["out"]
    assert below(out) == {f"start-{start}/{name}" for start in (1, 2) for name in FILES}


def test_what_promises_more_than_there_is_room_for_is_not_unfolded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.fbr"
    write_with_code(path)
    forge(path, CODE, "number = 1", num_bytes=HUGE, content=bomb(HUGE))
    forge(path, CODE, "number = 2", content=bomb(HUGE))
    forge(path, CODE, "number = 3", start="one")
    forge(path, CODE, "number = 4", start=0)
    with Recording.open(path) as recording:
        written = write_code(recording, tmp_path / "out")
        assert sorted(file.number for file in written.files) == [5, 6]
        assert len(written.damage) == 4
    write_with_code(tmp_path / "b.fbr")
    monkeypatch.setattr(recorded_code, "MAX_CODE_FILES", 4)
    with Recording.open(tmp_path / "b.fbr") as recording:
        assert len(recording.code()) == 4
        assert "are never written" in str(recording.damage[0])


def test_more_code_than_a_recording_takes_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "code"
    for name in ("a.py", "b.py", ".env", "a.pyc", "__pycache__/a.cpython-311.pyc", "lib/c.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1234")
    os.mkfifo(folder / "pipe.py")
    (folder / "link.py").symlink_to("a.py")
    (folder / "linked").symlink_to("lib")
    found = plain_files([(1, folder), (2, tmp_path / "gone")])
    assert [(file.start, file.path) for file in found] == [(1, "a.py"), (1, "b.py"), (1, "lib/c.py")]
    assert {read_plain(file) for file in found} == {b"1234"}
    (folder / "b.py").unlink()
    with pytest.raises(StorageFailed, match="the copy of the run's code cannot be read"):
        read_plain(found[1])
    for name, limit in (("MAX_CODE_FILES", 1), ("MAX_CODE_BYTES", 7), ("MAX_CODE_FILE_BYTES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(code_folders, name, limit)
            with pytest.raises(InvalidInput, match="the code of the run is more than"):
                plain_files([(1, folder)])


def test_what_cannot_be_written_out_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_with_code(tmp_path / "a.fbr")
    left = iter((False, False, True))

    def full(path: Path) -> None:
        if next(left):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(code_folders, "make_folder", full)
    with Recording.open(tmp_path / "a.fbr") as recording:
        with pytest.raises(StorageFailed, match="out cannot be written: No space left on device"):
            write_code(recording, tmp_path / "out")
        with pytest.raises(InvalidInput, match="there is no folder"):
            write_code(recording, tmp_path / "none" / "out")
    assert os.listdir(tmp_path) == ["a.fbr"]


def test_a_file_without_the_table_is_read_as_ever(tmp_path: Path) -> None:
    write_recording(tmp_path / "a.fbr")
    with closing(sqlite3.connect(tmp_path / "a.fbr")) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE name = 'code'").fetchall() == []
    with Recording.open(tmp_path / "a.fbr") as recording:
        assert (recording.code(), recording.verify()) == ([], [])
    # One that was taken out of it is missed.
    write_with_code(tmp_path / "b.fbr")
    with closing(sqlite3.connect(tmp_path / "b.fbr")) as database, database:
        database.execute("DROP TABLE code")
    with Recording.open(tmp_path / "b.fbr") as recording:
        assert recording.code() == []
        assert "code: 0 of 6 rows are there" in map(str, recording.verify())
