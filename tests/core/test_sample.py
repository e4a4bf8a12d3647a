"""Reading samples, and setting rewards into stored bodies."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forebay.core.errors import InvalidInput
from forebay.core.ids import read_uid
from forebay.core.outcome import RolloutOutcome
from forebay.core.records.reward_place import find_field, set_reward
from forebay.core.sample import Incoming, read_sample
from tests.kit import make_sample

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KEYS = TEXT | st.sampled_from(["reward", "raw_reward", 'reward"', "re\\ward", '"reward":', "messages", "uid"])
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | KEYS,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(KEYS, children, max_size=4),
    max_leaves=12,
)
REWARDS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def objects(draw: st.DrawFn, value: Any) -> str:
    """A JSON object as text: keys in any order and perhaps twice, spelt with escapes, any white space."""
    pairs = draw(st.lists(st.tuples(KEYS, JSON), max_size=5)) + list(value.items())
    gap = draw(st.sampled_from(["", " ", "\n\t", "\r\n  "]))
    members = [f"{draw(spellings(key))}{gap}:{gap}{json.dumps(part)}" for key, part in draw(st.permutations(pairs))]
    return f"{gap}{{{gap}{f'{gap},{gap}'.join(members)}{gap}}}{gap}"


@st.composite
def spellings(draw: st.DrawFn, text: str) -> str:
    if draw(st.integers(0, 3)):
        return json.dumps(text, ensure_ascii=draw(st.booleans()))
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in text) + '"'


def outcome_of(body: bytes, *, is_lenient: bool = False) -> tuple[Incoming | None, InvalidInput | None]:
    try:
        return read_sample(body, is_lenient=is_lenient), None
    except InvalidInput as error:
        return None, error


def read_or_none(body: bytes) -> Incoming | None:
    return outcome_of(body, is_lenient=True)[0]


@given(objects({"uid": "u", "instance_id": 1, "messages": [], "reward": 0.25}), REWARDS, st.none() | REWARDS)
def test_set_reward_is_decoding_changing_and_encoding(text: str, reward: float, raw: float | None) -> None:
    body = text.encode()
    sample = read_or_none(body)
    assume(sample is not None and sample.reward is not None)
    assert sample is not None
    expected = json.loads(body) | {"reward": reward} | ({} if raw is None else {"raw_reward": raw})
    assert json.loads(b"".join(set_reward(body, sample.reward_span, reward, raw))) == expected


@given(objects({"uid": "u", "instance_id": 1, "messages": [], "reward": 0.25}))
def test_index_columns_are_what_a_json_reader_sees(text: str) -> None:
    sample = read_or_none(text.encode())
    assume(sample is not None)
    assert sample is not None
    seen = json.loads(text)
    assert (sample.uid, sample.instance_id) == (read_uid(seen["uid"]), seen["instance_id"])
    assert isinstance(seen["messages"], list)
    reward = seen["reward"]
    is_number = isinstance(reward, int | float)  # true and false are 1 and 0
    if is_number and seen.get("status") != "failed":
        assert sample.reward == float(reward)
    else:
        assert (sample.reward, bool(sample.error)) == (None, True)


@given(st.binary(max_size=60) | objects({}).map(str.encode))
def test_any_body_is_read_or_refused_with_a_field(body: bytes) -> None:
    sample, error = outcome_of(body)
    if error is not None:
        assert (error.status, bool(error.field), bool(error.message)) == (422, True, True)
    else:
        assert isinstance(json.loads(body), dict)
        assert sample is not None
        assert sample.body is body


@given(st.binary(max_size=12) | JSON.map(json.dumps).map(str.encode))
def test_whatever_is_accepted_can_be_parsed_by_python(part: bytes) -> None:
    body = b'{"uid":"u","instance_id":1,"messages":[%s],"reward":1,"more":%s}' % (part, part)
    if read_or_none(body) is not None:
        assert json.loads(body)["uid"] == "u"


@pytest.mark.parametrize("number", ["9" * 4_301, "-" + "1" * 20_000, "[" + "7" * 4_301 + "]"])
@pytest.mark.parametrize("padding", [0, 1, 2_149, 2_150, 4_299, 4_300, 9_000])
def test_integer_that_python_refuses_is_refused(number: str, padding: int) -> None:
    body = f'{{"uid":"u","instance_id":1,"messages":[],"x":"{"y" * padding}","reward":1,"n":{number}}}'.encode()
    with pytest.raises(ValueError, match="digits"):
        json.loads(body)
    with pytest.raises(InvalidInput, match="too long"):
        read_sample(body, is_lenient=True)


@pytest.mark.parametrize(
    "more", ['"n":' + "9" * 4_300, '"text":"' + "1" * 50_000 + '"', '"tokens":[' + "10," * 9_000 + "1]"]
)
def test_many_digits_that_python_reads_are_accepted(more: str) -> None:
    body = f'{{"uid":"u","instance_id":1,"messages":[],"reward":1,{more}}}'.encode()
    assert json.loads(body)
    assert read_sample(body, is_lenient=True).reward == 1.0


REFUSED = {
    "not JSON": (b"{", "body"),
    "not an object": (b"[]", "body"),
    "not UTF-8": (b'{"uid":"u","instance_id":1,"messages":[],"reward":1,"x":"\xff"}', "body"),
    "control character": (b'{"uid":"u","instance_id":1,"messages":[],"reward":1,"x":"\x01"}', "body"),
    "unknown escape": (b'{"uid":"u","instance_id":1,"messages":[],"reward":1,"x":"\\x"}', "body"),
    "NaN": (b'{"uid":"u","instance_id":1,"messages":[],"reward":NaN}', "body"),
    "nested NaN": (b'{"uid":"u","instance_id":1,"messages":[],"reward":1,"x":[NaN]}', "body"),
    "deep": (b'{"uid":"u","instance_id":1,"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}", "body"),
    "two objects": (json.dumps(make_sample()).encode() * 2, "body"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_text_that_is_no_sample_is_refused(name: str) -> None:
    body, field = REFUSED[name]
    with pytest.raises(InvalidInput) as caught:
        read_sample(body, is_lenient=True)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("uid", value) for value in (..., None, "", True, 10**1_024, "x" * 1_025, ["u"])],
        *[("instance_id", value) for value in (..., None, "", True, [1], {"a": 1}, "x" * 1_025)],
        *[("messages", value) for value in (..., None, "text", {}, 1)],
        *[("epoch", value) for value in (-1, 1.0, "0", True, 1 << 41)],
        *[("slot", value) for value in (-1, 0.5, "0", False, 65_536)],
    ],
)
def test_wrong_field_is_named(field: str, value: Any) -> None:
    body = json.dumps(make_sample(**{field: value})).encode()
    for is_lenient in (True, False):
        with pytest.raises(InvalidInput) as caught:
            read_sample(body, is_lenient=is_lenient)
        assert caught.value.field == field


@pytest.mark.parametrize("reward", [..., None, "1", [1], {}, 10**400])
def test_unusable_reward_is_failed_for_slime_and_refused_natively(reward: Any) -> None:
    body = json.dumps(make_sample(reward=reward)).encode()
    sample = read_sample(body, is_lenient=True)
    assert (sample.reward, sample.error) == (None, "invalid_reward")
    with pytest.raises(InvalidInput) as caught:
        read_sample(body, is_lenient=False)
    assert caught.value.field == "reward"


@pytest.mark.parametrize("error", ["it broke", {"type": "ValueError", "message": "it broke"}, None, {}, 7])
def test_failed_sample_needs_no_reward_and_keeps_its_error(error: Any) -> None:
    body = json.dumps(make_sample(reward=..., status="failed", error=error)).encode()
    sample = read_sample(body, is_lenient=False)
    assert sample.reward is None
    assert sample.error
    assert ("it broke" in sample.error) == bool(error and error != 7)


def test_reward_of_a_failed_sample_counts_as_none() -> None:
    assert read_sample(json.dumps(make_sample(reward=1.0, status="failed")).encode(), is_lenient=False).reward is None


@pytest.mark.parametrize("instance_id", [0, -5, 2**80, "0", " ", "\u0001", "🜁"])
def test_instance_keeps_type_and_value(instance_id: str | int) -> None:
    sample = read_sample(json.dumps(make_sample(instance_id=instance_id)).encode(), is_lenient=False)
    assert (type(sample.instance_id), sample.instance_id) == (type(instance_id), instance_id)


def test_everything_but_the_reward_stays_byte_for_byte() -> None:
    body = b'{ "uid":"u","instance_id":1,"x":1.000, "reward" : 0.5e0 ,"messages":[],"u":"\xc3\xa9\\u00e9" }'
    sample = read_sample(body, is_lenient=False)
    assert sample.reward_span is not None
    changed = b"".join(set_reward(body, sample.reward_span, -1.5, 0.5))
    assert changed == body.replace(b"0.5e0", b'-1.5,"raw_reward":0.5')


def test_reward_spelt_with_escapes_beside_a_nested_one_is_the_one_that_changes() -> None:
    body = b'{"uid":"u","instance_id":1,"messages":[],"r\\u0065ward":1.0,"extra_info":{"reward":5}}'
    sample = read_sample(body, is_lenient=False)
    changed = json.loads(b"".join(set_reward(body, sample.reward_span, 0.0, None)))
    assert (changed["reward"], changed["extra_info"]["reward"]) == (0.0, 5)


NAMES = ("reward", "r\\u0065ward", "extra_info", "messages", "uid", "instance_id", "é")
VALUES = {
    "reward": "0.25",
    "r\\u0065ward": "0.25",
    "extra_info": '{"reward": 7, "note": "\\"reward\\": 8"}',
    "messages": '[{"reward": 9}, {"content": "say \\"reward\\": 0.25, \\\\"}]',
    "uid": '"u"',
    "instance_id": "1",
    "é": '"\\u00e9 é"',
}


@given(st.permutations(NAMES), st.sampled_from((":", " : ", ":\n")))
def test_the_reward_is_found_in_any_order_and_among_others_of_its_name(names: list[str], colon: str) -> None:
    """Of two at the top the last counts, as for any reader of JSON."""
    body = ("{" + ",".join(f'"{name}"{colon}{VALUES[name]}' for name in names) + "}").encode()
    sample = read_sample(body, is_lenient=False)
    assert sample.reward_span is not None
    start, end = sample.reward_span
    assert body[start:end] == b"0.25"
    assert json.loads(b"".join(set_reward(body, sample.reward_span, -2.0, None))) == json.loads(body) | {"reward": -2.0}


def test_a_field_that_was_copied_is_found_nowhere() -> None:
    body = b'{"reward":0.25}'
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    assert find_field(body, fields["reward"]) == (10, 14)
    assert find_field(body, fields["reward"].copy()) is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_span_of_a_plain_body_holds_the_number(reward: float) -> None:
    body = json.dumps(make_sample(reward=reward)).encode()
    span = read_sample(body, is_lenient=False).reward_span
    assert span is not None
    assert math.isclose(float(body[span[0] : span[1]]), reward, rel_tol=0.0)


def read(*, is_lenient: bool = False, **changes: Any) -> Incoming:
    return read_sample(json.dumps(make_sample(**changes)).encode(), is_lenient=is_lenient)


FAILED = {"reward": ..., "status": "failed", "error": "it broke"}


@pytest.mark.parametrize("outcome", list(RolloutOutcome))
def test_each_outcome_is_read_and_only_ok_and_truncated_have_a_reward(outcome: RolloutOutcome) -> None:
    is_failed = outcome not in (RolloutOutcome.OK, RolloutOutcome.TRUNCATED)
    for is_lenient in (False, True):
        sample = read(outcome=outcome.value, is_lenient=is_lenient, **(FAILED if is_failed else {}))
        assert (sample.outcome, sample.reward) == (outcome, None if is_failed else 1.0)


def test_without_an_outcome_the_status_and_the_reward_tell() -> None:
    assert read().outcome == "ok"
    assert read(**FAILED).outcome == "agent_failure"
    assert read(reward="high", is_lenient=True).outcome == "judge_failure"


@pytest.mark.parametrize(
    "changes",
    [
        *({"outcome": told} for told in ("fine", "", 1, ["ok"], {"ok": 1}, True)),
        *({"outcome": outcome, **FAILED} for outcome in ("ok", "truncated")),
        {"outcome": "engine_failure", "reward": 0.0},
        {"outcome": "cancelled", "reward": ...},
    ],
)
def test_an_outcome_that_is_none_or_contradicts_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="outcome") as caught:
        read(**changes)
    assert caught.value.field == "outcome"


def test_slime_writers_may_call_their_own_things_outcome_and_fork() -> None:
    assert (read(outcome="won", is_lenient=True).outcome, read(outcome="won", is_lenient=True).reward) == ("ok", 1.0)
    assert read(outcome="ok", is_lenient=True, **FAILED).outcome == "agent_failure"
    assert read(outcome="engine_failure", reward=0.0, is_lenient=True).reward is None, (
        "a failure is never a reward of 0"
    )
    assert read(fork="knife", is_lenient=True).fork == read(fork=3, is_lenient=True).fork == 0


def test_a_fork_names_its_slot_and_its_rollout() -> None:
    place = {"epoch": 0, "slot": 2, "rollout_id": "r"}
    assert [read(fork=fork, **place).fork for fork in (0, 1, 65_535)] == [0, 1, 65_535]
    assert read(fork=0).fork == read(fork=None).fork == 0
    wrong = [
        *({"fork": fork, **place} for fork in (-1, 65_536, True, 1.0, "1")),
        *({"fork": 1, **place, n: ...} for n in place),
    ]
    for changes in wrong:
        with pytest.raises(InvalidInput, match="fork must be") as caught:
            read(**changes)
        assert caught.value.field == "fork"
