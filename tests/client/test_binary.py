"""What a writer sends of a sample with arrays."""

import json
import math
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay.client.sample_writer.encode import encode_sample
from forebay.core.binary_sample import as_json, is_binary
from tests.kit import Json, make_sample

LISTS = {"tokens": [1, 2, 3], "logprobs": [-0.5, -0.25, -1.0], "loss_mask": [0, 1, 1]}


def tensor(values: list[float], dtype: str | None = None, *, requires_grad: bool = False) -> Any:
    """One of torch, which takes a second to load, in workers that may run no test of it."""
    import torch

    return torch.tensor(values, dtype=dtype and getattr(torch, dtype), requires_grad=requires_grad)


def decoded(body: bytes) -> Any:
    return json.loads(as_json(body))


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values,
        tuple,
        np.array,
        tensor,
        lambda values: tensor(values, dtype="bfloat16" if isinstance(values[0], float) else "int16"),
        lambda values: (
            tensor(values, dtype="float64", requires_grad=True) if isinstance(values[0], float) else tensor(values)
        ),
        lambda values: array("d" if isinstance(values[0], float) else "q", values),
        lambda values: array("f", values) if isinstance(values[0], float) else np.array(values, dtype=np.int32),
        lambda values: np.array(values * 2)[: len(values)],
        lambda values: np.repeat(np.array(values), 2)[::2],
    ],
    ids=["list", "tuple", "numpy", "torch", "small torch", "torch with grad", "array", "exact", "slice", "strided"],
)
def test_every_kind_of_array_is_sent_as_the_same_bytes(make: Any) -> None:
    sample = make_sample(**LISTS)
    body = encode_sample(sample | {name: make(values) for name, values in LISTS.items()})
    assert body == encode_sample(sample)
    assert is_binary(body)
    assert decoded(body) == sample


def test_a_sample_without_tokens_is_json() -> None:
    sample = make_sample(logprobs=[-0.5])
    assert json.loads(encode_sample(sample)) == sample
    assert json.loads(encode_sample(sample | {"tokens": None})) == sample | {"tokens": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": ["a"]},
        {"tokens": [2**31]},
        {"tokens": [1.5]},
        {"tokens": "abc"},
        {"tokens": {"1": 2}},
        {"tokens": 7},
        {"tokens": [[1], [2]]},
        {"loss_mask": [0.5, 1, 1]},
        {"loss_mask": [0, 256, 1]},
        {"logprobs": ["x", 1, 2]},
        {"logprobs": [{"token": 1}]},
    ],
)
def test_values_that_fit_into_no_array_go_as_they_are(changes: Any) -> None:
    sample = make_sample(**(LISTS | changes))
    body = encode_sample(sample)
    assert not is_binary(body)
    assert json.loads(body) == sample


def test_numpy_arrays_that_fit_into_no_array_go_as_lists() -> None:
    body = encode_sample(make_sample(tokens=np.array([2**40]), values=np.array([0.5]), step=np.int64(3)))
    assert json.loads(body)["tokens"] == [2**40]
    body = encode_sample(make_sample(tokens=np.array([1]), values=np.array([0.5]), step=np.int64(3)))
    assert is_binary(body)
    assert (decoded(body)["values"], decoded(body)["step"]) == ([0.5], 3)


def test_a_logprob_that_an_engine_leaves_out_is_null_again() -> None:
    body = encode_sample(make_sample(**(LISTS | {"logprobs": [None, -0.5, math.inf]})))
    assert is_binary(body)
    assert decoded(body)["logprobs"] == [None, -0.5, None]


def test_what_cannot_be_json_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="object is not a JSON value"):
        encode_sample(make_sample(**LISTS, thing=object()))


@pytest.mark.parametrize("arrays", [LISTS, {}])
@pytest.mark.parametrize("thing", ["\ud800", {"\ud800": 1}, 10**5_000], ids=["text", "key", "number"])
def test_text_and_numbers_that_json_does_not_have_are_told_with_their_sample(arrays: Json, thing: Any) -> None:
    with pytest.raises(TypeError, match="sample 'odd' is not representable in JSON"):
        encode_sample(make_sample(**arrays, uid="odd", thing=thing))


@pytest.mark.parametrize("make", [list, np.array, tensor])
def test_a_mask_of_whole_floats_is_a_mask(make: Callable[[list[float]], Any]) -> None:
    body = encode_sample(make_sample(**(LISTS | {"loss_mask": make([0.0, 1.0, 1.0])})))
    assert is_binary(body)
    assert decoded(body)["loss_mask"] == [0, 1, 1]


@pytest.mark.parametrize("wrong", [0.5, -1.0, 256.0, math.inf, math.nan])
@pytest.mark.parametrize("make", [list, np.array])
def test_a_mask_of_other_floats_goes_as_a_list(make: Callable[[list[float]], Any], wrong: float) -> None:
    assert not is_binary(encode_sample(make_sample(**(LISTS | {"loss_mask": make([0.0, 1.0, wrong])}))))
