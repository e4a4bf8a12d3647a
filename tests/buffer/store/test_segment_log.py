"""The log under damage: whatever happens to its bytes, every whole record is found, in order, and nothing else."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.buffer.store.log_segments import SegmentLog, segment_path
from forebay.core.errors import StorageFailed
from forebay.core.records.disk_files import DiskFiles
from forebay.core.records.log_records import HEADER_BYTES, RECORD_VERSION, LogEntry, Position, encode_start
from forebay.core.records.rows import SampleRow, TickRow
from tests.buffer.store.sample_entries import entry

START = Position(0, 0)


class Log:
    """A log in a directory, and what a reader finds in it."""

    def __init__(self, path: Path, segment_bytes: int = 10**9) -> None:
        self.path = path
        self.quarantine = path.parent / "quarantine"
        path.mkdir(exist_ok=True)
        self.log = SegmentLog(path, self.quarantine, DiskFiles(), segment_bytes)
        self.log.open()

    def numbers(self) -> list[int]:
        """The numbers of the entries found from the beginning."""
        return [number for record in self.log.scan(START) for number in _numbers(record.rows)]

    def whole_numbers(self) -> list[int]:
        """The same of those whose body is what was written."""
        return [number for record in self.log.scan(START) if record.is_whole for number in _numbers(record.rows)]

    def write(self, *entries: LogEntry) -> None:
        for one in entries:
            self.log.write([one])


def _numbers(rows: list[object]) -> list[int]:
    found = []
    for row in rows:
        assert isinstance(row, TickRow | SampleRow)
        found.append(int(row.active_s if isinstance(row, TickRow) else row.at_s))
    return found


def reopened(log: Log) -> Log:
    log.log.close()
    return Log(log.path)


def ends_of(log: Log, segment: int = 1) -> list[int]:
    return [record.end.offset for record in log.log.scan(START) if record.end.segment == segment]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    made = Log(tmp_path / "segments")
    made.write(*(entry(i, b"body %d" % i if i % 2 else b"") for i in range(6)))
    assert made.numbers() == list(range(6))
    return made


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_torn_tail_is_cut_and_writing_goes_on(log: Log) -> None:
    path = segment_path(log.path, 1)
    path.write_bytes(path.read_bytes()[:-3])
    again = reopened(log)
    assert again.numbers() == [0, 1, 2, 3, 4]
    assert again.log.num_torn_bytes > 0
    assert again.log.num_quarantined == 0
    again.write(entry(9))
    assert reopened(again).numbers() == [0, 1, 2, 3, 4, 9]


@pytest.mark.parametrize("place", ["magic", "length", "payload"])
def test_damaged_record_is_set_aside_and_the_next_one_is_found(log: Log, place: str) -> None:
    start, end = ends_of(log)[1:3]
    offset = {"magic": start, "length": start + 20, "payload": start + HEADER_BYTES + 2}[place]
    change(segment_path(log.path, 1), offset, b"\xff\xff\xff\xff")
    damaged = segment_path(log.path, 1).read_bytes()[start:end]
    again = reopened(log)
    assert again.numbers() == [0, 1, 3, 4, 5]
    assert (again.log.num_quarantined, again.log.num_torn_bytes) == (1, 0)
    assert [path.read_bytes() for path in log.quarantine.iterdir()] == [damaged]
    assert segment_path(log.path, 1).read_bytes()[start:end] == damaged


def test_damage_is_counted_once_however_often_it_is_read(log: Log) -> None:
    change(segment_path(log.path, 1), 3, b"\xff")
    again = reopened(log)
    assert again.numbers() == again.numbers() == [1, 2, 3, 4, 5]
    assert again.log.num_quarantined == 1


def test_damage_at_the_end_of_an_earlier_segment_is_no_torn_tail(tmp_path: Path) -> None:
    log = Log(tmp_path / "segments", segment_bytes=1)
    log.write(*map(entry, range(3)))
    assert log.log.num_segments == 3
    change(segment_path(log.path, 2), HEADER_BYTES + 1, b"\xff")
    size = segment_path(log.path, 2).stat().st_size
    again = reopened(log)
    assert again.numbers() == [0, 2]
    assert (again.log.num_quarantined, again.log.num_torn_bytes) == (1, 0)
    assert segment_path(log.path, 2).stat().st_size == size


def test_damage_of_a_confirmed_last_record_is_not_cut_while_open(log: Log) -> None:
    change(segment_path(log.path, 1), ends_of(log)[-2] + HEADER_BYTES, b"\xff")
    assert log.numbers() == [0, 1, 2, 3, 4]
    assert (log.log.num_quarantined, log.log.num_torn_bytes) == (1, 0)


def test_a_damaged_body_costs_neither_its_rows_nor_the_next_record(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """Its sample stays known, so that its group can be told of."""
    path, body = segment_path(log.path, 1), b"body 3"
    change(path, path.read_bytes().index(body), b"\xff")
    again = reopened(log)
    assert again.numbers() == list(range(6))
    assert (again.log.num_quarantined, again.log.num_torn_bytes) == (1, 0)
    assert "the body of sample '3', of group g of run run-1" in caplog.text


def test_a_last_record_with_a_damaged_body_is_a_torn_write(log: Log) -> None:
    """Its length came to the disk, its bytes did not: nobody was promised it, and its writer sends it again."""
    path = segment_path(log.path, 1)
    data = path.read_bytes()
    path.write_bytes(data[:-6] + bytes(6))
    again = reopened(log)
    assert again.numbers() == list(range(5))
    assert again.log.num_torn_bytes > 6
    again.write(entry(7, b"body 7"))
    assert reopened(again).numbers() == [*range(5), 7]


def test_record_inside_a_body_is_never_taken_for_one(tmp_path: Path) -> None:
    log = Log(tmp_path / "segments")
    inner = entry(77)
    body = encode_start(inner, 1, 0)
    log.write(entry(1, body), entry(2))
    change(segment_path(log.path, 1), 0, b"\x00" * HEADER_BYTES)
    assert reopened(log).numbers() == [2]


def test_stale_bytes_of_another_place_are_no_record(log: Log) -> None:
    path = segment_path(log.path, 1)
    data = path.read_bytes()
    path.write_bytes(data + data[: ends_of(log)[0]])
    again = reopened(log)
    assert again.numbers() == list(range(6))
    assert path.read_bytes() == data


def test_record_larger_than_the_read_window_is_found_behind_damage(tmp_path: Path) -> None:
    log = Log(tmp_path / "segments")
    log.write(entry(1, b"a" * 5_000_000), entry(2, b"b" * 9_000_000), entry(3))
    change(segment_path(log.path, 1), 100, b"\x00" * 200)
    assert reopened(log).numbers() == [2, 3]


def test_records_of_a_newer_version_are_refused_and_left_alone(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.core.records.log_records.RECORD_VERSION", RECORD_VERSION + 1)
    log.write(entry(9))
    monkeypatch.undo()
    data = segment_path(log.path, 1).read_bytes()
    with pytest.raises(StorageFailed, match=f"version {RECORD_VERSION + 1}"):
        reopened(log).numbers()
    assert segment_path(log.path, 1).read_bytes() == data


def test_cut_takes_back_an_unconfirmed_segment(tmp_path: Path) -> None:
    log = Log(tmp_path / "segments", segment_bytes=1)
    log.write(entry(1))
    segment_path(log.path, 2).write_bytes(b"rest of a failed write")
    log.log.cut()
    log.write(entry(2))
    assert reopened(log).numbers() == [1, 2]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    where=st.floats(0, 1, exclude_max=True),
    junk=st.binary(min_size=1, max_size=80),
    tail=st.floats(0, 1),
    segment_bytes=st.sampled_from([1, 500, 10**6]),
)
def test_every_untouched_record_survives_damage_anywhere(
    sizes: list[int], where: float, junk: bytes, tail: float, segment_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        log = Log(Path(directory) / "segments", segment_bytes)
        log.write(*(entry(i, b"z" * size) for i, size in enumerate(sizes)))
        last = log.log.end.segment
        path = segment_path(log.path, last)
        starts = dict(zip(_numbers_of(log, last), [0, *ends_of(log, last)], strict=False))
        data = path.read_bytes()
        kept = data[: max(1, int(len(data) * tail))]
        offset = int(len(kept) * where)
        path.write_bytes(kept[:offset] + junk + kept[offset + len(junk) :])
        untouched = {
            number
            for number, end in zip(starts, ends_of_data(data, starts), strict=True)
            if end <= offset or (starts[number] >= offset + len(junk) and end <= len(kept))
        }
        found = reopened(log).whole_numbers()
        assert found == sorted(set(found))
        earlier = set(range(len(sizes))) - set(starts)
        assert earlier | untouched <= set(found)
        changed = {n for n in starts if n not in untouched}
        assert all(_is_same(path, data, starts, n) for n in changed & set(found))
        again = reopened(Log(log.path))
        assert again.whole_numbers() == found
        assert again.log.num_torn_bytes == 0
        again.log.close()


def _numbers_of(log: Log, segment: int) -> list[int]:
    return [n for record in log.log.scan(START) if record.end.segment == segment for n in _numbers(record.rows)]


def ends_of_data(data: bytes, starts: dict[int, int]) -> list[int]:
    return [*list(starts.values())[1:], len(data)]


def _is_same(path: Path, data: bytes, starts: dict[int, int], number: int) -> bool:
    """Whether a record that lies in the changed range kept its bytes, because the junk equals them."""
    ends = dict(zip(starts, ends_of_data(data, starts), strict=True))
    return path.read_bytes()[starts[number] : ends[number]] == data[starts[number] : ends[number]]
