"""Side arrays: what a sample says of its rows is checked against its parts, and becomes arrays again."""

import json
from typing import Any

import msgspec
import numpy
import pytest

from forebay.core.errors import InvalidInput
from forebay.core.parts import CheckedPart, Rows, Tensor, check_arrays, gather_rows, pack_arrays, read_fields

ROUTES = numpy.arange(24, dtype="uint8").reshape(6, 4)
IDS, LENGTHS = numpy.arange(7, dtype="<i4"), numpy.array([2, 0, 5], "<i4")
TENSORS = {
    "routes": Tensor("U8", (6, 4), ROUTES.tobytes()),
    "mask": Tensor("I32", (7,), IDS.tobytes()),
    "mask.lengths": Tensor("I32", (3,), LENGTHS.tobytes()),
    "short": Tensor("I32", (7,), IDS.tobytes()),
    "short.lengths": Tensor("I32", (1,), b"\6\0\0\0"),
}
PART = CheckedPart.of(pack_arrays(TENSORS).data)
DIGEST = "0" * 32


def fields(arrays: dict[str, Any]) -> Any:
    return read_fields(msgspec.Raw(json.dumps([DIGEST]).encode()), msgspec.Raw(json.dumps(arrays).encode()))


def routes(*rows: tuple[int, int, int, int], **other: Any) -> dict[str, Any]:
    return {"routes": {"dtype": "U8", "shape": [4], "rows": rows} | other}


def ragged(name: str, *rows: tuple[int, int, int, int]) -> dict[str, Any]:
    return {name: {"dtype": "I32", "shape": [None], "rows": rows}}


def test_rows_come_back_where_they_were() -> None:
    given = fields(routes((0, 1, 0, 2), (0, 3, 2, 4), (0, 5, 8, 9)) | ragged("mask", (0, 1, 3, 5)))
    check_arrays(given, [PART], 10)
    made = gather_rows(given, {DIGEST: PART.tensors}, ["routes", "mask"])
    assert made["routes"].tokens == [(0, 4), (8, 9)]
    dense = made["routes"].dense(10)
    assert dense.dtype == numpy.int16
    assert dense[[0, 1, 2, 3, 8]].tolist() == ROUTES[1:].tolist()
    assert (dense[[4, 5, 6, 7, 9]] == -1).all()
    assert made["routes"].dense(10, fill=0).dtype == numpy.uint8
    ids, offsets = made["mask"].csr(10, start=2)
    assert ids.tolist() == [2, 3, 4, 5, 6]
    assert offsets.tolist() == [0, 0, 0, 5, 5, 5, 5, 5, 5]
    assert made["mask"].csr(10, start=5)[0].tolist() == []
    with pytest.raises(InvalidInput):
        made["mask"].dense(10)
    with pytest.raises(InvalidInput):
        Rows(ROUTES, [(0, 6)]).csr(6)


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        (routes((0, 0, 0, 11)), "tokens 0 to 11 must lie between 0 and 10"),
        (routes((0, 0, 0, 2), (0, 2, 1, 3)), "tokens 1 to 3 must lie between 2 and 10"),
        (routes((0, 3, 0, 4)), "rows 3 to 7 must be among 6 rows"),
        (routes((1, 0, 0, 1)), "part 1 must be one of 1 parts"),
        (routes((0, 0, 0, 1), dtype="I16"), "its tensor must be I16 of shape [None, 4] (got U8 of shape [6, 4])"),
        (routes((0, 0, 0, 1), shape=[None]), "its tensor must be U8 of shape [None] (got U8 of shape [6, 4])"),
        (routes(), "must have rows"),
        (ragged("mask", (0, 1, 0, 3)), "rows 1 to 4 must be among 3 rows"),
        (ragged("short", (0, 0, 0, 1)), "must add up to 7 items (got 6)"),
        ({"other": routes((0, 0, 0, 1))["routes"]}, "must be a tensor of its part"),
        ({"Routes": {}}, "must have a name of"),
        ({f"a{number}": {} for number in range(17)}, "must have at most 16 arrays (got 17)"),
    ],
)
def test_rows_that_do_not_exist_are_refused(arrays: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_arrays(fields(arrays), [PART], 10)
    assert complaint in refused.value.message
    assert (refused.value.field or "").startswith("arrays")
