"""Files that somebody else made, to do harm: none of them is believed, and none of them is run."""

import json
import os
import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from forebay.core.errors import StorageFailed
from forebay.replay import EngineRecorder, RecordedEngine, Recording
from forebay.replay.errors import RecordingDamaged
from forebay.replay.recording_schema import GROUPS, META, SAMPLES, RecordingTable, checksum, create
from tests.cli.conftest import Forebay, forebay
from tests.replay.recordings.recording_kit import group_record, write_recording

__all__ = ["forebay"]

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
HUGE = 100 << 30


def bomb(num_bytes: int) -> bytes:
    """A zstd frame that is to unfold to so many zeros, with a checksum: its head, and the first of its blocks."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0b11000100, 10 << 3]) + num_bytes.to_bytes(8, "little")
    return head + (1 << 17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"


def forge(path: Path, table: RecordingTable, where: str, /, **columns: object) -> None:
    """Change a row, and let its checksum agree."""
    with closing(sqlite3.connect(path)) as database, database:
        for name, value in columns.items():
            database.execute(f"UPDATE {table.name} SET {name} = ? WHERE {where}", (value,))
        row = database.execute(f"SELECT {', '.join(table.columns)} FROM {table.name} WHERE {where}").fetchone()
        database.execute(f"UPDATE {table.name} SET checksum = ? WHERE {where}", (checksum(row),))


def test_a_frame_that_unfolds_to_more_than_there_is_room_for_is_not_unfolded(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)
    forge(path, SAMPLES, "seq = 2", num_bytes=HUGE, body=bomb(HUGE))
    with Recording.open(path) as recording:
        first, second = recording.samples(group_record(1).group_id)
        assert recording.body(first)
        with pytest.raises(RecordingDamaged, match=r"to hold 107,374,182,400 bytes: more than .* are never written"):
            recording.body(second)
        assert any("are never written" in each.reason for each in recording.verify())


async def test_a_recorded_call_is_not_unfolded_either(tmp_path: Path) -> None:
    path = tmp_path / "calls.fbr"
    values = (1, "", b"0" * 16, 0, "POST", "/generate", bomb(HUGE), 200, "{}", bomb(HUGE), 1.0)
    with closing(create(path)) as connection:
        connection.execute(f"INSERT INTO calls VALUES ({', '.join('?' * len(values))})", values)
    async with RecordedEngine(path) as engine:
        assert "are never written" in engine.damaged[1]


def _view(database: sqlite3.Connection) -> None:
    database.execute("DROP TABLE groups")
    columns = "x AS number, 'a' AS group_id, 1 AS num_rows, '{}' AS json, x'' AS checksum"
    database.execute(f"CREATE VIEW groups AS {ENDLESS} SELECT {columns} FROM n")


def _trigger(database: sqlite3.Connection) -> None:
    database.execute("CREATE TRIGGER t AFTER INSERT ON calls BEGIN DELETE FROM calls WHERE seq < new.seq; END")


@pytest.mark.parametrize(("plant", "what"), [(_view, "a view"), (_trigger, "a trigger")])
def test_a_file_with_more_than_tables_is_refused_before_any_of_it_runs(
    tmp_path: Path, plant: Callable[[sqlite3.Connection], None], what: str
) -> None:
    path = tmp_path / "a.fbr"
    create(path).close()
    with closing(sqlite3.connect(path)) as database, database:
        plant(database)
    before = path.read_bytes()
    with pytest.raises(RecordingDamaged, match=f"it has {what}"):
        Recording.open(path)
    for engine in (RecordedEngine(path), EngineRecorder(path, "http://127.0.0.1:9")):
        with pytest.raises(RecordingDamaged, match=f"it has {what}"), engine.in_thread():
            pass
    assert path.read_bytes() == before


def test_rows_that_say_what_no_row_says_are_damaged_and_break_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, 4)
    forge(path, META, "name = 'run'", json='{"payload":' + "[" * 100_000)
    forge(path, GROUPS, "number = 4", json=17)
    forge(path, SAMPLES, "seq = 1", group_id=group_record(2).group_id)
    forge(path, SAMPLES, "seq = 5", num_bytes="many")
    with Recording.open(path) as recording:
        with pytest.raises(RecordingDamaged):
            _ = recording.run
        assert [group.number for group in recording.groups()] == [1, 2, 3]
        for number in (1, 2, 3):
            with pytest.raises(RecordingDamaged):
                recording.samples(group_record(number).group_id)
        named = {each.place for each in recording.verify()}
        assert {"meta run", "groups 4", "samples 1", "samples 5"} <= named


def test_a_time_that_no_calendar_has_is_shown(tmp_path: Path, forebay: Forebay) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path, created_at_s=1e300, name="\x1b]0;mine\x07")
    shown = forebay("recording", "show", path)
    assert (shown.code, "1e+300 s" in shown.out, "\x1b" in shown.out) == (0, True, False)


def test_a_file_system_without_links_has_a_recording_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    write_recording(tmp_path / "a.fbr")
    assert os.listdir(tmp_path) == ["a.fbr"]
    with Recording.open(tmp_path / "a.fbr") as recording:
        assert recording.verify() == []


def test_a_disk_that_is_full_from_the_beginning_has_nothing_left_on_it(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        with pytest.raises(StorageFailed, match="cannot be written"):
            write_recording(tmp_path / "a.fbr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_a_file_that_promises_any_number_of_rows_is_not_searched_for_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)
    with closing(sqlite3.connect(path)) as database:
        (text,) = database.execute("SELECT json FROM meta WHERE name = 'made'").fetchone()
        database.execute("DROP TABLE groups")
        database.commit()
    forge(path, META, "name = 'made'", json=json.dumps({**json.loads(text), "last_group": 2**62}))
    with Recording.open(path) as recording:
        assert recording.groups() == []
        assert f"-{2**62}: they are not looked for" in str(recording.damage[-1])
