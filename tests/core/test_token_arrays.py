"""Binary samples: what comes out is what went in, and what is not one is refused."""

import json
import math
import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.batch_tensors import token_row
from forebay.core.binary_sample import (
    ABSENT,
    MAGIC,
    as_json,
    float_bytes,
    int_bytes,
    is_binary,
    join_samples,
    mask_bytes,
    number_bytes,
    pack,
    split_samples,
)
from forebay.core.errors import InvalidInput
from forebay.core.records.reward_place import set_reward
from forebay.core.sample import SampleHead, read_any_sample, read_sample
from tests.kit import make_sample

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
READ_FIELDS = {*SampleHead.__struct_fields__, "tokens", "logprobs", "loss_mask", "response_length"}
EXTRAS = st.dictionaries(TEXT.filter(lambda key: key not in READ_FIELDS and key not in make_sample()), TEXT, max_size=3)
REWARDS = st.floats(allow_nan=False, allow_infinity=False)


def packed(json_part: bytes, tokens: list[int], logprobs: list[float] | None, loss_mask: list[int] | None) -> bytes:
    data = (
        array("i", tokens).tobytes(),
        None if logprobs is None else array("f", logprobs).tobytes(),
        None if loss_mask is None else array("B", loss_mask).tobytes(),
    )
    return pack(json_part, *data)


def binary(num_tokens: int = 3, num_logprobs: int | None = 3, num_mask: int | None = 3, **changes: Any) -> bytes:
    logprobs = None if num_logprobs is None else [-0.5] * num_logprobs
    loss_mask = None if num_mask is None else [1] * num_mask
    return packed(json.dumps(make_sample(**changes)).encode(), list(range(num_tokens)), logprobs, loss_mask)


@st.composite
def binaries(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A sample as its reader is to see it, and its binary form."""
    rest = make_sample(reward=draw(REWARDS)) | draw(EXTRAS)
    tokens = draw(st.lists(INT32, max_size=6))
    sizes = st.lists(FLOAT32, min_size=len(tokens), max_size=len(tokens))
    logprobs = draw(st.none() | sizes)
    loss_mask = draw(st.none() | st.lists(st.integers(0, 255), min_size=len(tokens), max_size=len(tokens)))
    told = {"tokens": tokens}
    if logprobs is not None:
        told["logprobs"] = [value if math.isfinite(value) else None for value in logprobs]
    if loss_mask is not None:
        told["loss_mask"] = loss_mask
    return rest | told, packed(json.dumps(rest).encode(), tokens, logprobs, loss_mask)


@given(binaries())
def test_a_binary_sample_is_its_json_and_its_fields_are_read_like_those(made: tuple[dict[str, Any], bytes]) -> None:
    expected, body = made
    assert json.loads(as_json(body)) == expected
    sample, same = read_any_sample(body), read_sample(as_json(body), is_lenient=False)
    assert (sample.uid, sample.instance_id, sample.reward) == (same.uid, same.instance_id, same.reward)
    assert sample.body == body


@given(binaries(), REWARDS, st.none() | REWARDS, st.booleans())
def test_a_reward_is_set_into_a_binary_sample_as_into_its_json(
    made: tuple[dict[str, Any], bytes], reward: float, raw: float | None, is_span_known: bool
) -> None:
    expected, body = made
    span = read_any_sample(body).reward_span if is_span_known else None
    changed = b"".join(set_reward(body, span, reward, raw))
    assert is_binary(changed)
    told = {"reward": reward} | ({} if raw is None else {"raw_reward": raw})
    assert json.loads(as_json(changed)) == expected | told


def test_a_span_is_known_where_the_json_leaves_no_doubt() -> None:
    body = binary(reward=0.25)
    span = read_any_sample(body).reward_span
    assert span is not None
    assert body[slice(*span)] == b"0.25"


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_samples_of_a_request_come_apart_as_they_were_joined(samples: list[bytes]) -> None:
    assert split_samples(join_samples(samples)) == samples


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_a_request_that_is_cut_off_is_refused(samples: list[bytes], data: st.DataObject) -> None:
    whole = join_samples(samples)
    ends = {len(join_samples(samples[:count])) for count in range(len(samples) + 1)}
    cut = data.draw(st.integers(0, len(whole)).filter(lambda at: at not in ends))
    with pytest.raises(InvalidInput, match="incomplete"):
        split_samples(whole[:cut])


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: MAGIC + tail))
def test_bytes_that_are_no_sample_are_refused_and_never_crash(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_any_sample(body)


@pytest.mark.parametrize(
    ("sizes", "response_length", "field"),
    [
        ((3, 2, 3), ..., "logprobs"),
        ((3, 3, 4), ..., "loss_mask"),
        ((3, 0, None), ..., "logprobs"),
        ((3, 2, 2), 1, "logprobs"),
        ((3, 2, 2), 2.0, "logprobs"),
        ((3, 1, 1), True, "logprobs"),
        ((3, 4, None), 4, "logprobs"),
    ],
)
def test_arrays_of_a_wrong_length_are_refused_by_name(sizes: Any, response_length: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_any_sample(binary(*sizes, response_length=response_length))
    assert refused.value.field == field


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, None, None), (3, 2, 2), (3, 2, 3), (3, 3, 2), (0, 0, 0)])
def test_arrays_cover_all_tokens_or_the_response(sizes: Any) -> None:
    length = 2 if sizes[0] else 0
    assert read_any_sample(binary(*sizes, response_length=length)).uid


@pytest.mark.parametrize("name", ["tokens", "logprobs", "loss_mask"])
def test_an_array_that_is_in_the_json_too_is_refused(name: str) -> None:
    for sizes in ((3, 3, 3), (3, None, None)):
        with pytest.raises(InvalidInput, match="must not be in a binary sample") as refused:
            read_any_sample(binary(*sizes, **{name: [1, 2, 3]}))
        assert refused.value.field == name


def test_null_in_the_json_is_no_array() -> None:
    body = binary(3, None, 3, logprobs=None)
    assert json.loads(as_json(body))["logprobs"] is None
    assert read_any_sample(body).body == body


@pytest.mark.parametrize("odd", ["1e400", "[" * 500 + "]" * 500, "1" + "0" * 400])
def test_fields_that_nobody_can_use_harm_nobody(odd: str) -> None:
    text = (
        json.dumps(make_sample())[:-1] + f', "response_length": {odd}, "raw_reward": {odd}, "weight_version": {odd}}}'
    )
    body = packed(text.encode(), [1, 2], None, [0, 1])
    assert read_any_sample(body).reward == 1.0
    row = token_row((body,))
    assert (row.num_tokens, row.response_length, row.weight_version, row.reward) == (2, -1, -1, 1.0)
    assert math.isnan(row.raw_reward)
    as_lists = as_json(body).replace(b'"loss_mask":[0,1]', f'"loss_mask":{odd}'.encode())
    assert token_row((as_lists,)).num_tokens == 0


@pytest.mark.parametrize(
    "body",
    [
        MAGIC,
        MAGIC + struct.pack("<III", 5, ABSENT, ABSENT) + b"1234",
        MAGIC + struct.pack("<III", 2**31, 2**31, 2**31),
        MAGIC + struct.pack("<III", 0, 0, 0),
        pack(b" " + json.dumps(make_sample()).encode(), b""),
        pack(b"[1]", b""),
        pack(b'{"uid": ', b""),
    ],
)
def test_a_damaged_body_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_any_sample(body)


def test_a_binary_sample_has_tokens() -> None:
    head = struct.pack("<III", ABSENT, ABSENT, ABSENT)
    with pytest.raises(InvalidInput) as refused:
        read_any_sample(MAGIC + head + json.dumps(make_sample()).encode())
    assert refused.value.field == "tokens"


def test_slimes_own_way_of_writing_takes_no_binary_sample() -> None:
    with pytest.raises(InvalidInput, match="not JSON"):
        read_sample(binary(), is_lenient=True)


def test_values_that_fit_into_no_array_are_told() -> None:
    assert int_bytes([1, 2**31], "i") is None
    assert int_bytes([1.0], "i") is None
    assert int_bytes([256], "B") is None
    assert mask_bytes([0, 1.0, True, 255.0]) == bytes([0, 1, 1, 255])
    assert [mask_bytes([value]) for value in (0.5, 256.0, -1.0, math.nan, math.inf, "1", None)] == [None] * 7
    assert number_bytes([1.0], "i") is None
    assert float_bytes(["x"]) is None
    assert float_bytes([None, 1]) == array("f", [math.nan, 1.0]).tobytes()
