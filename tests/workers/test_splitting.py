"""Data split along its first axis, and joined again."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import InvalidInput
from forebay.workers.groups.splitting import join, register_split, split


def parts_of(value: Any, num_workers: int = 4) -> list[Any]:
    return list(split(value, num_workers, "value")[0])


@given(st.integers(0, 40), st.integers(1, 9))
def test_what_was_split_is_joined_to_the_same(length: int, num_workers: int) -> None:
    numbers = list(range(length))
    inner = {"array": np.arange(length), "rows": [[number] for number in numbers]}
    nested = {"list": numbers, "tuple": tuple(numbers), "inner": inner}
    parts, sizes = split(nested, num_workers, "nested")
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    whole = join(parts)
    assert whole["list"] == numbers
    assert whole["tuple"] == tuple(numbers)
    assert whole["inner"]["array"].tolist() == numbers
    assert whole["inner"]["rows"] == inner["rows"]


def test_arrays_and_tensors_are_split_along_their_first_axis_into_copies() -> None:
    import torch

    array, tensor = np.arange(12).reshape(6, 2), torch.arange(12).reshape(6, 2)
    arrays, tensors = parts_of(array), parts_of(tensor)
    assert [part.shape for part in arrays] == [(2, 2), (2, 2), (1, 2), (1, 2)]
    assert [tuple(part.shape) for part in tensors] == [(2, 2), (2, 2), (1, 2), (1, 2)]
    arrays[0][:] = -1
    tensors[0][:] = -1
    assert array[0].tolist() == [0, 1]
    assert tensor[0].tolist() == [0, 1]
    assert join(parts_of(array)).tolist() == array.tolist()
    assert torch.equal(join(parts_of(tensor)), tensor)


class Point(NamedTuple):
    x: list[int]
    y: list[int]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "int"),
        (None, "NoneType"),
        ("abcd", "str"),
        (b"abcd", "bytes"),
        ({1, 2}, "set"),
        (np.float64(3), "float64"),
        (np.array(3), "ndarray"),
        (Point([1], [2]), "a named tuple has fields"),
        ({"a": [1, 2], "b": [1]}, r"its values differ in length: \{'a': 2, 'b': 1\}"),
        ({"a": [1, 2], "b": 3}, "argument 'b' cannot be split: int"),
    ],
)
def test_what_has_no_first_axis_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=f"argument x cannot be split: {said}") as e:
        split(value, 2, "x")
    assert e.value.field == "x"
    assert e.value.hint


def test_a_tensor_of_no_axis_is_refused_by_name() -> None:
    import torch

    with pytest.raises(InvalidInput, match="argument x cannot be split: Tensor"):
        split(torch.tensor(3), 2, "x")


def test_results_of_several_kinds_are_not_joined() -> None:
    assert join([1, 2]) == [1, 2]
    assert join([None, None]) == [None, None]
    with pytest.raises(InvalidInput, match="different types cannot be joined: list, tuple") as e:
        join([[1], (2,)])
    assert "DP_COMPUTE_METRIC" in e.value.hint
    with pytest.raises(InvalidInput, match="mappings with different keys"):
        join([{"a": [1]}, {"b": [1]}])


class Table:
    """A type that knows nothing of splitting."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)


def split_table(table: Table, sizes: Sequence[int]) -> list[Table]:
    rows: Iterator[int] = iter(table.rows)
    return [Table([next(rows) for _ in range(size)]) for size in sizes]


def join_tables(tables: Sequence[Table]) -> Table:
    return Table([row for table in tables for row in table.rows])


def test_other_types_are_split_and_joined_as_they_say() -> None:
    class Longer(Table):
        pass

    forget = register_split(Table, split_table, join_tables, length=lambda table: len(table.rows))
    assert [part.rows for part in parts_of(Longer(range(6)))] == [[0, 1], [2, 3], [4], [5]]
    assert join(parts_of(Table(range(6)))).rows == list(range(6))
    assert join(parts_of({"t": Table(range(6))}))["t"].rows == list(range(6))
    forget()
    with pytest.raises(InvalidInput, match="cannot be split: Table"):
        parts_of(Table(range(6)))


def test_a_type_that_splits_into_too_few_parts_is_refused() -> None:
    forget = register_split(Table, lambda table, _: [table], join_tables, length=lambda table: len(table.rows))
    with pytest.raises(InvalidInput, match="Table was split into 1 parts, not 4"):
        parts_of(Table(range(6)))
    forget()
    with pytest.raises(InvalidInput, match="is not a class"):
        register_split("Table", split_table, join_tables)  # type: ignore[arg-type]


def test_neither_numpy_nor_torch_is_loaded_to_split() -> None:
    code = (
        "import sys; from forebay.workers.groups import *; from forebay.workers.groups.splitting import split, join;"
        "assert join(split({'a': [1, 2]}, 2, 'x')[0]) == {'a': [1, 2]};"
        "found = {'numpy', 'torch', 'ray', 'cloudpickle', 'pydantic'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
