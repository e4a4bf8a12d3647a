"""Reading bodies in few large reads gives the same bytes as reading each alone, and never others than were written."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.buffer.store.abc import Edited, Piece, Slice
from forebay.buffer.store.bodies import INLINE_BYTES, STRETCH_BYTES, BodyReader
from forebay.buffer.store.log_segments import SegmentLog, segment_path
from forebay.core.errors import BodyUnreadable, StorageFailed
from forebay.core.records.disk_files import DiskFiles
from forebay.core.records.rows import Location
from tests.buffer.store.sample_entries import entry

SIZES = (0, 1, 9, 90, 300, 4_000, 5_000, 20_000, 100_000)
NUM_BODIES = 120

Bodies = dict[Location, bytes]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


@pytest.fixture(scope="module")
def bodies(directory: Path) -> Bodies:
    """What lies in two segments."""
    rng = random.Random(1)
    log = SegmentLog(directory, directory / "quarantine", DiskFiles(), 1_500_000)
    log.open()
    made: Bodies = {}
    for number in range(NUM_BODIES):
        body = rng.randbytes(rng.choice(SIZES))
        [at] = log.write([entry(number, body, has_body=True)])
        assert at is not None
        made[at] = body
    log.close()
    assert {at.segment for at in made} == {1, 2}
    return made


@pytest.fixture(scope="module")
def reader(directory: Path, bodies: Bodies) -> BodyReader:
    return BodyReader(directory, DiskFiles())


def places(count: int) -> st.SearchStrategy[list[int]]:
    """Which bodies are wanted."""
    return st.lists(st.integers(0, NUM_BODIES - 1), max_size=count)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=places(60))
def test_bodies_come_in_the_order_asked_for(reader: BodyReader, bodies: Bodies, wanted: list[int]) -> None:
    known = list(bodies)
    locations = [known[place] for place in wanted]
    assert reader.read(locations) == [bodies[at] for at in locations]
    slices = [Slice(at, at.length // 3, at.length // 2, is_proved=bool(at.offset % 2)) for at in locations]
    expected = [bodies[each.location][each.start : each.stop] for each in slices]
    assert reader.read_slices(slices) == expected
    assert reader.read_slices_cached(slices) in (None, expected)
    reader.prove(locations)


@settings(max_examples=200, deadline=None)
@given(wanted=places(60), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)), text=st.binary(max_size=40))
def test_what_is_gathered_has_each_edit_at_its_place(
    reader: BodyReader, bodies: Bodies, wanted: list[int], cut: tuple[float, float], text: bytes
) -> None:
    known = list(bodies)
    pieces: list[Piece] = []
    expected = []
    for at in (known[place] for place in wanted):
        start, stop = (int(at.length * part) for part in sorted(cut))
        pieces += [Edited(at, start, stop, text), text]
        expected += [bodies[at][:start] + text + bodies[at][stop:], text]
    joined = b"".join(told + b"," for told in expected)
    assert reader.gather(pieces) == joined
    assert reader.gather_cached(pieces) in (None, joined)


def test_large_sets_are_not_read_where_the_loop_stands(reader: BodyReader, bodies: Bodies) -> None:
    at = next(at for at in bodies if at.length == max(SIZES))
    many = [at] * (INLINE_BYTES // at.length + 1)
    assert reader.read_slices_cached([Slice(each, 0, 1) for each in many]) is None
    assert not reader.prove_cached(many)


@pytest.mark.parametrize("place", [Location(1, 10**9, 2), Location(2, 3_000_000, 1), Location(9, 60, 1)])
def test_body_that_is_not_there_is_told_with_its_segment(reader: BodyReader, bodies: Bodies, place: Location) -> None:
    with pytest.raises(StorageFailed, match=f"segment {place.segment}"):
        reader.read([next(iter(bodies)), place])


@pytest.mark.parametrize("size", [300, 20_000, 2 * STRETCH_BYTES])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, size: int) -> None:
    """In any byte of the body; one in its checksum, or of another's body at its place, is no better."""
    rng = random.Random(size)
    first, second = rng.randbytes(size), rng.randbytes(size)
    log = SegmentLog(tmp_path, tmp_path / "quarantine", DiskFiles())
    log.open()
    [at], [other] = log.write([entry(1, first)]), log.write([entry(2, second)])
    log.close()
    assert at is not None
    assert other is not None
    reader, path = BodyReader(tmp_path, DiskFiles()), segment_path(tmp_path, 1)
    good = path.read_bytes()
    assert reader.read([at, other]) == [first, second]
    flipped = [at.offset, at.offset + size - 1, *(at.offset + rng.randrange(size) for _ in range(10)), at.offset - 1]
    damaged = [good[:place] + bytes([good[place] ^ 1 << rng.randrange(8)]) + good[place + 1 :] for place in flipped]
    damaged.append(good[: at.offset] + second + good[at.offset + size :])
    damaged.append(good[: at.offset - 8] + good[other.offset - 8 : other.offset + size] + good[at.offset + size :])
    for data in damaged:
        path.write_bytes(data)
        for ask in (reader.read, reader.prove, lambda places: reader.gather([Edited(places[0], 0, 3, b"")])):
            with pytest.raises(BodyUnreadable, match=f"segment 1: bytes {at.offset} to"):
                ask([at])
        assert not reader.prove_cached([at])
        assert reader.read([other]) == [second]
