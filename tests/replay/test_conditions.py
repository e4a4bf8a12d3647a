"""What a start of a replay must ask for as it was recorded, and what it is told of."""

from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.records.recording_rows import RecordedRun
from forebay.replay.conditions import MUST_AGREE, code_in_words, in_words, may_differ, must_agree
from forebay.replay.errors import ReplayDiffers

PAYLOAD = {
    "task_type": "math",
    "input_file": "rows.jsonl",
    "num_repeat_per_sample": "8",
    "max_tokens": "1024",
    "sampling_params": {"temperature": 0.7, "top_p": None},
    "model": "tiny",
    "difficulty": "hard",
}


def record(**changes: Any) -> RecordedRun:
    """A run that asked for ``PAYLOAD``."""
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "name": "",
        "task_type": "math",
        "origin": "native",
        "state": "finished",
        "reason": "",
        "created_at_s": 0.0,
        "payload": PAYLOAD,
        "generator_sha256": "g1",
        "generator_hooks": [],
        "generator_contract": None,
        "input_sha256": "a" * 64,
        "weight_version": 3,
    }
    return RecordedRun(**fields | changes)


def test_the_same_in_other_words_agrees() -> None:
    said = {**PAYLOAD, "group_size": 8, "sampling_params": {"temperature": "0.7", "max_tokens": 1024}}
    del said["num_repeat_per_sample"], said["max_tokens"]
    moved = said | {"input_file": "/elsewhere/rows.jsonl", "name": "again", "num_process": 3, "replay": "run-1"}
    assert must_agree(record(), moved, input_sha256="a" * 64) == []
    assert may_differ(record(), moved, input_sha256="a" * 64) == []


@pytest.mark.parametrize(
    ("change", "field", "recorded", "now"),
    [
        ({"num_repeat_per_sample": 4}, "group_size", 8, 4),
        ({"model": None}, "model", "tiny", None),
        ({"template_path": "chat"}, "template_path", None, "chat"),
        ({"max_tokens": 10}, "sampling_params.max_tokens", 1024, 10),
        ({"sampling_params": {"temperature": 1}}, "sampling_params.temperature", 0.7, 1),
        ({"sampling_params": {"temperature": 0.7, "stop": ["\n"]}}, "sampling_params.stop", None, ["\n"]),
    ],
)
def test_each_difference_is_named_and_each_may_be_ignored(
    change: dict[str, Any], field: str, recorded: object, now: object
) -> None:
    payload = PAYLOAD | change
    assert must_agree(record(), payload) == [{"field": field, "recorded": recorded, "now": now}]
    assert must_agree(record(), payload, ignore=[field]) == []
    assert must_agree(record(), payload, ignore=[field.partition(".")[0]]) == []
    assert len(must_agree(record(), payload, ignore=["input_file"])) == 1
    assert may_differ(record(), payload) == []


def test_capture_is_compared_where_both_say_what_it_is() -> None:
    captured = record(payload=PAYLOAD | {"capture": "true"})
    assert [each["field"] for each in must_agree(captured, PAYLOAD | {"capture": False})] == ["capture"]
    assert must_agree(captured, PAYLOAD | {"capture": True}) == must_agree(captured, PAYLOAD) == []


def test_rows_are_compared_by_content_and_only_where_it_is_known() -> None:
    moved = PAYLOAD | {"input_file": "other.jsonl"}
    (rows,) = must_agree(record(), moved, input_sha256="b" * 64)
    assert rows["recorded"] == f"rows.jsonl (sha256 {'a' * 16})"
    assert rows["now"].startswith("other.jsonl")
    assert must_agree(record(), moved, input_sha256="b" * 64, ignore=["input_sha256"]) == []
    assert must_agree(record(input_sha256=""), moved, input_sha256="b" * 64) == must_agree(record(), moved) == []
    (told,) = may_differ(record(input_sha256=""), moved, input_sha256="b" * 64)
    assert told == {"field": "input_file", "recorded": "rows.jsonl", "now": "other.jsonl"}


def test_a_name_that_nothing_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="did you mean model") as refused:
        must_agree(record(), PAYLOAD, ignore=["modell"])
    assert refused.value.field == "replay.ignore"
    assert all(name in refused.value.hint for name in MUST_AGREE)
    for wrong in ("model.x", "sampling_params.", ""):
        with pytest.raises(InvalidInput):
            must_agree(record(), PAYLOAD, ignore=[wrong])


def test_who_answers_and_judges_may_differ_and_is_told() -> None:
    payload = PAYLOAD | {"task_type": "sums", "difficulty": "x" * 500}
    told = may_differ(record(), payload)
    assert [each["field"] for each in told] == ["task_type", "difficulty"]
    assert "task_type was 'math' in the recording, now 'sums'" in in_words(told)
    assert code_in_words({"judge.py": "g1"}, {"judge.py": "g2"}).endswith("recording: judge.py")
    assert len(told[-1]["now"]) < 300
    assert may_differ(record(), PAYLOAD) == []


def test_no_secret_is_shown() -> None:
    recorded = record(payload=PAYLOAD | {"judge_api_key": "sk-then", "judge": {"url": "http://me:pw@judge/v1"}})
    payload = PAYLOAD | {"judge_api_key": "sk-now", "judge": {"url": "http://me:pw2@judge/v1?key=k", "hf_token": "hf"}}
    (shown,) = may_differ(recorded, payload)
    assert shown == {"field": "judge", "recorded": {"url": "http://judge/v1"}, "now": {"url": "http://judge/v1?key="}}
    assert "difficulty" not in str(ReplayDiffers(must_agree(record(), PAYLOAD | {"model": "x"})))
