"""Values as JSON and tensors, and back: the same types, bit for bit, or a refusal that names the place."""

import collections
import enum
import math
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from forebay.core.errors import InvalidInput
from forebay.replay.skip import NotStorable, register_codec
from forebay.replay.skip.values import Packed, pack, unpack


def through_files(value: object) -> Any:
    """The value, packed, its arrays written to a file, and made again."""
    packed = pack(value)
    return unpack(packed.tree, load(save(packed.arrays)))


def same(one: Any, other: Any) -> bool:
    """Equal in types, too, and NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    return bool(one == other)


texts = st.text(st.characters(codec=None, exclude_categories=()))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary()
keys = st.integers() | texts | st.tuples(st.integers(), texts) | st.sampled_from(["$tensor", "$dict", "$", "a/b"])
values = st.recursive(
    scalars | st.sets(st.integers() | texts) | st.frozensets(st.binary()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@settings(max_examples=60)
@given(values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert same(through_files(value), value)


@pytest.mark.parametrize("value", [2**5000, -(2**64), 2**63, -(2**63), [1, 2**63], [0.5, math.inf], [True, 1], -0.0])
def test_numbers_at_their_edges(value: Any) -> None:
    assert same(through_files(value), value)


NUMPY_TYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64",
]  # fmt: skip


@pytest.mark.parametrize("name", NUMPY_TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 2), (2, 0)])
def test_arrays_of_numpy(name: str, shape: tuple[int, ...]) -> None:
    array = numpy.random.default_rng(1).integers(0, 2, shape).astype(name)
    back = through_files({"odd": numpy.int8([1]), "array": array})["array"]
    numpy.testing.assert_array_equal(back, array, strict=True)
    assert back.flags.writeable
    assert back.flags.aligned


def test_arrays_that_lie_otherwise_in_memory() -> None:
    array = numpy.arange(12).reshape(3, 4)
    for each in (array.T, array[::2], array[:, ::-1], array.astype(">i8"), numpy.asfortranarray(array)):
        numpy.testing.assert_array_equal(through_files(each), each)


def test_arrays_of_objects_and_texts() -> None:
    items = numpy.empty((2, 2), dtype=object)
    items[0, 0], items[0, 1], items[1, 0] = [1, 2], {"a": numpy.int16([3])}, "x"
    back = through_files(items)
    assert (back.dtype, back.shape, back[0, 0], back[1, 0], back[1, 1]) == (object, (2, 2), [1, 2], "x", None)
    numpy.testing.assert_array_equal(back[0, 1]["a"], numpy.int16([3]), strict=True)
    uid = numpy.array(["uid_sample_0_1", ""])
    numpy.testing.assert_array_equal(through_files(uid), uid, strict=True)


@pytest.mark.parametrize(
    "scalar", [numpy.float32(0.1), numpy.int8(-3), numpy.bool_(True), numpy.str_("x"), numpy.float16("nan")]
)
def test_scalars_of_numpy(scalar: Any) -> None:
    back = through_files([scalar])[0]
    assert type(back) is type(scalar)
    assert back == scalar or numpy.isnan(scalar)


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    names = [*NUMPY_TYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    tensors = {name: torch.tensor([[0, 1], [1, 0]]).to(getattr(torch, name)) for name in names}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "view": torch.arange(6).reshape(2, 3).T}
    tensors |= {"conj": torch.tensor([1j], dtype=torch.complex64).conj(), "grad": torch.ones(2, requires_grad=True)}
    back = through_files(tensors)
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        as_bytes = [
            each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (back[name], tensor)
        ]
        assert torch.equal(*as_bytes)
    back["int64"][0, 0] = 5  # memory of its own
    assert tensors["int64"][0, 0] == 0
    for refused in (torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.nn.Parameter(torch.ones(1))):
        with pytest.raises(NotStorable, match="result/batch"):
            pack({"batch": refused})


class Color(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    one: int
    two: int


class Text(str):
    pass


REFUSED = [
    object(), Color.RED, Pair(1, 2), Text("x"), collections.OrderedDict(a=1), lambda: 1, numpy.datetime64("2026-01-01"),
    numpy.array(["2026-01-01"], dtype="datetime64[D]"), numpy.zeros(2, dtype=[("a", int)]), numpy.complex128(1),
    bytearray(b"x"), range(3), numpy.ma.array([1]),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_would_not_come_back_as_it_was_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(NotStorable, match="result/rows/1: a ") as caught:
        pack({"rows": [[1, 2], value]})
    assert type(value).__name__ in str(caught.value)
    assert "register_codec" in caught.value.hint


def test_what_contains_itself_or_is_too_deep_is_refused() -> None:
    looped: list[Any] = []
    looped.append(looped)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in (looped, deep):
        with pytest.raises(NotStorable, match="nested too deeply"):
            pack(value)


def test_tensors_of_one_name_do_not_get_mixed_up() -> None:
    one, two, three = numpy.int8([1]), numpy.int8([2]), numpy.int8([3])
    back = through_files({"a": {"b": one}, "a/b": two, 1: {"c": three}, "1": {"c": one}})
    assert [back["a"]["b"][0], back["a/b"][0], back[1]["c"][0], back["1"]["c"][0]] == [1, 2, 3, 1]


def test_equal_values_have_equal_digests() -> None:
    def digest(value: object) -> str:
        return pack(value).digest()

    assert digest({"a": numpy.arange(3), "s": {"x", "y", "z"}}) == digest({"a": numpy.arange(3), "s": {"z", "y", "x"}})
    others = [1, True, 1.0, "1", [1], (1,), numpy.int64(1), numpy.int64([1]), numpy.int64([[1]]), numpy.int32([1, 0])]
    assert len({digest(value) for value in others}) == len(others)


class Own:
    """Has a codec."""


def test_codecs_say_how_a_class_is_stored() -> None:
    register_codec(Own, lambda own: (1, own.__class__.__name__), lambda tree: Own() if tree == (1, "Own") else None)  # type: ignore[arg-type,return-value]
    assert type(through_files([Own()])[0]) is Own
    for wrong in ((1, str, str), (Own, 1, str), (Own, str, None)):
        with pytest.raises(InvalidInput):
            register_codec(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tree",
    [
        b'{"$eval":"1"}',
        b'{"$objects":[],"shape":[1]}',
        b'{"$scalar":1,"dtype":"load"}',
        b"[",
        b'{"$array":"x","as":"numpy"}',
    ],
)
def test_a_tree_that_was_never_packed_makes_nothing(tree: bytes) -> None:
    with pytest.raises((KeyError, ValueError)):
        unpack(tree, {})


def test_packing_copies_nothing_large() -> None:
    array = numpy.arange(1000)
    packed = pack(array)
    assert isinstance(packed, Packed)
    array[0] = 7
    assert packed.arrays["result"][0] == 7
