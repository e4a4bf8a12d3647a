"""Reading bodies in few large reads gives the same bytes as reading each alone."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.buffer.store.abc import Edited, Piece
from forebay.buffer.store.bodies import INLINE_BYTES, BodyReader
from forebay.buffer.store.files import DiskFiles
from forebay.buffer.store.log_segments import segment_path
from forebay.buffer.store.rows import Location
from forebay.core.errors import StorageFailed

SIZE = 3_000_000


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    rng = random.Random(1)
    return {number: rng.randbytes(SIZE) for number in (1, 2)}


@pytest.fixture(scope="module")
def reader(segments: dict[int, bytes], tmp_path_factory: pytest.TempPathFactory) -> BodyReader:
    path: Path = tmp_path_factory.mktemp("segments")
    for number, data in segments.items():
        segment_path(path, number).write_bytes(data)
    return BodyReader(path, DiskFiles())


locations = st.builds(
    lambda segment, offset, length: Location(segment, offset, min(length, SIZE - offset)),
    st.sampled_from([1, 2]),
    st.one_of(st.integers(0, SIZE), st.integers(0, 50_000)),
    st.one_of(st.integers(0, 5_000), st.integers(0, 100_000)),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(locations, max_size=60))
def test_bodies_come_in_the_order_asked_for(
    reader: BodyReader, segments: dict[int, bytes], wanted: list[Location]
) -> None:
    expected = [segments[place.segment][place.offset : place.offset + place.length] for place in wanted]
    assert reader.read(wanted) == expected
    assert reader.read_cached(wanted) in (None, expected)


edits = st.builds(
    lambda location, cut, text: Edited(location, min(cut), max(cut), text),
    locations,
    st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)),
    st.binary(max_size=40),
).filter(lambda edit: edit.stop <= edit.location.length)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.one_of(edits, st.binary(max_size=100)), max_size=60))
def test_what_is_gathered_has_each_edit_at_its_place(
    reader: BodyReader, segments: dict[int, bytes], pieces: list[Piece]
) -> None:
    expected = b"".join(told + b"," for piece in pieces for told in [edited(segments, piece)])
    assert reader.gather(pieces) == expected
    assert reader.gather_cached(pieces) in (None, expected)


def test_neighbours_of_any_number_are_gathered(reader: BodyReader, segments: dict[int, bytes]) -> None:
    pieces = [Edited(Location(1, n * 100, 90), 40, 45, b"new") for n in range(2_000)]
    assert reader.gather(pieces) == b"".join(edited(segments, piece) + b"," for piece in pieces)


def edited(segments: dict[int, bytes], piece: Piece) -> bytes:
    if not isinstance(piece, Edited):
        return bytes(piece)
    segment, at, length = piece.location.segment, piece.location.offset, piece.location.length
    body = segments[segment][at : at + length]
    return body[: piece.start] + piece.text + body[piece.stop :]


def test_large_sets_are_not_read_where_the_loop_stands(reader: BodyReader) -> None:
    assert reader.read_cached([Location(1, 0, INLINE_BYTES + 1)]) is None


@pytest.mark.parametrize("place", [Location(1, SIZE - 1, 2), Location(2, SIZE + 5, 1), Location(3, 0, 1)])
def test_body_that_is_not_there_is_told_with_its_segment(reader: BodyReader, place: Location) -> None:
    with pytest.raises(StorageFailed, match=f"segment {place.segment}"):
        reader.read([Location(1, 0, 10), place])
