"""How the turns of a rollout become samples."""

import math
from typing import Any

import msgspec
import pytest

from forebay.engines.capture.trajectory import Drift, Trajectory
from forebay.engines.capture.turn import SamplingSpan, VersionSpan
from tests.engines.capture.kit import assert_covered, make_turn, recorded, trained


def test_a_single_turn_is_one_sample_with_its_prompt_masked() -> None:
    (sample,) = recorded(make_turn([1, 2], [3, 4])).samples()
    told = sample.fields()
    assert (told["tokens"], told["loss_mask"], told["logprobs"]) == ([1, 2, 3, 4], [0, 0, 1, 1], [0.0, 0.0, -0.1, -0.2])
    assert told["token_spans"] == [
        {"source": "environment", "start": 0, "end": 2},
        {"source": "llm", "start": 2, "end": 4},
    ]
    assert told["messages"] == [{"role": "user", "content": "go"}, {"role": "assistant", "content": "x"}]
    assert not {"weight_version", "weight_versions", "retokenized"} & told.keys()


def test_a_tool_result_is_a_source_of_its_own() -> None:
    first = make_turn([1, 2], [3, 4])
    asked = [*first.messages, first.reply, {"role": "tool", "content": "7"}]
    trajectory = recorded(first, make_turn([1, 2, 3, 4, 5, 6], [7], messages=asked))
    (sample,) = trajectory.samples()
    assert [(span.source, span.start, span.end) for span in sample.token_spans] == [
        ("environment", 0, 2),
        ("llm", 2, 4),
        ("tool", 4, 6),
        ("llm", 6, 7),
    ]
    assert sample.loss_mask == [0, 0, 1, 1, 0, 0, 1]
    assert trajectory.counters == {"clean": 2}


def test_versions_are_told_by_span_and_in_order_of_use() -> None:
    first = make_turn([1], [2, 3], versions=[VersionSpan("8", 0, 2)])
    spans = [VersionSpan("7", 0, 1), VersionSpan("9", 1, 3)]
    (sample,) = recorded(first, make_turn([1, 2, 3, 4], [5, 6, 7], versions=spans, is_kv_mixed=True)).samples()
    told = sample.fields()
    assert told["weight_versions"] == [8, 7, 9]
    assert told["token_spans"][1:] == [
        {"source": "llm", "start": 1, "end": 3, "weight_version": 8},
        {"source": "environment", "start": 3, "end": 4},
        {"source": "llm", "start": 4, "end": 5, "weight_version": 7, "mixed_kv": True},
        {"source": "llm", "start": 5, "end": 7, "weight_version": 9, "mixed_kv": True},
    ]


def test_one_version_is_told_as_one_and_words_are_left_out() -> None:
    told = recorded(make_turn([1], [2], versions=[VersionSpan("7", 0, 1)])).samples()[0].fields()
    assert told["weight_version"] == 7
    told = recorded(make_turn([1], [2], versions=[VersionSpan("default", 0, 1)])).samples()[0].fields()
    assert not {"weight_version", "weight_versions"} & told.keys()
    assert "weight_version" not in told["token_spans"][1]


def test_versions_without_spans_are_told_all_the_same() -> None:
    (sample,) = recorded(make_turn([1], [2], seen_versions=["7", "8"])).samples()
    assert sample.weight_versions == [7, 8]
    assert sample.token_spans[1].weight_version is None


def test_a_response_that_ends_differently_is_realigned() -> None:
    trajectory = recorded(make_turn([1, 2], [3, 4, 5, 6]), make_turn([1, 2, 3, 4, 9, 8], [7]))
    (sample,) = trajectory.samples()
    assert sample.tokens == [1, 2, 3, 4, 9, 8, 7]
    assert sample.loss_mask == [0, 0, 1, 1, 0, 0, 1]
    assert sample.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.1]
    assert trajectory.counters == {"clean": 1, "realigned": 1, "realigned_tokens": 2}
    assert_covered(sample)


def test_a_response_that_is_mostly_lost_is_a_fork() -> None:
    trajectory = Trajectory()
    assert trajectory.add(make_turn([1, 2], [3, 4, 5])) is Drift.CLEAN
    assert trajectory.add(make_turn([1, 2, 3, 9, 8], [7])) is Drift.FORK
    fork, main = trajectory.samples()
    assert (trained(fork), trained(main)) == ([3, 4, 5], [7])
    assert trajectory.counters == {"clean": 1, "forked": 1}


def test_thinking_that_a_template_removes_makes_a_sample_of_each_turn() -> None:
    trajectory = recorded(
        make_turn([1], [90, 91, 2]), make_turn([1, 2, 3], [92, 93, 4]), make_turn([1, 2, 3, 4, 5], [94, 6])
    )
    assert [sample.tokens for sample in trajectory.samples()] == [
        [1, 90, 91, 2],
        [1, 2, 3, 92, 93, 4],
        [1, 2, 3, 4, 5, 94, 6],
    ]
    assert trajectory.counters == {"clean": 1, "forked": 2}


def test_a_fork_goes_on_from_what_it_shares_and_tokens_are_trained_once() -> None:
    """The second response is lost, the first is not: it belongs to the main sample."""
    trajectory = recorded(make_turn([1], [2]), make_turn([1, 2, 3], [4, 5, 6]), make_turn([1, 2, 3, 7], [8]))
    fork, main = trajectory.samples()
    assert (fork.tokens, fork.loss_mask) == ([1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1])
    assert (main.tokens, main.loss_mask) == ([1, 2, 3, 7, 8], [0, 1, 0, 0, 1])
    assert fork.logprobs == [0.0, -0.1, 0.0, -0.1, -0.2, -0.3]


@pytest.mark.parametrize("prompt", [[5, 6], [1, 9, 3], [1]], ids=["sub-agent", "another history", "compacted"])
def test_a_prompt_of_its_own_is_a_fork(prompt: list[int]) -> None:
    trajectory = recorded(make_turn([1, 2], [3, 4]), make_turn(prompt, [7]))
    fork, main = trajectory.samples()
    assert (fork.tokens, main.tokens) == ([1, 2, 3, 4], [*prompt, 7])
    assert trajectory.counters == {"clean": 1, "forked": 1}


def test_several_choices_are_samples_of_their_own() -> None:
    choices = [make_turn([1, 2], [place, 9], choice=place) for place in (3, 4, 5)]
    trajectory = recorded(*choices, make_turn([1, 2, 4, 9, 6], [7]))
    assert [trained(sample) for sample in trajectory.samples()] == [[3, 9], [5, 9], [4, 9, 7]]
    assert trajectory.counters == {"clean": 4, "branched": 2}


def test_an_inner_prompt_asked_again_keeps_its_place() -> None:
    """Also where the turn before it had been realigned."""
    turns = [make_turn([1], [2, 3, 4]), make_turn([1, 2, 3, 9], [5]), make_turn([1, 2, 3, 9], [6])]
    trajectory = recorded(*turns)
    fork, main = trajectory.samples()
    assert (trained(fork), trained(main)) == ([5], [2, 3, 6])
    assert trajectory.counters == {"clean": 2, "branched": 1, "realigned": 1, "realigned_tokens": 1}


def test_the_rest_of_an_aborted_turn_is_joined_to_it() -> None:
    first = make_turn([1, 2], [3], finish_reason="abort", versions=[VersionSpan("1", 0, 1)])
    trajectory = recorded(first, make_turn([1, 2, 3], [4, 5], versions=[VersionSpan("2", 0, 2)]))
    (turn,) = trajectory.turns()
    assert (turn.prompt_ids, turn.sampled_ids, turn.finish_reason) == ([1, 2], [3, 4, 5], "stop")
    (sample,) = trajectory.samples()
    assert sample.loss_mask == [0, 0, 1, 1, 1]
    assert sample.weight_versions == [1, 2]
    assert trajectory.counters == {"clean": 1, "merged": 1}


def test_an_aborted_turn_that_nobody_goes_on_with_is_in_no_sample() -> None:
    aborted = make_turn([1, 2, 3], [8, 9], finish_reason="abort")
    trajectory = recorded(make_turn([1], [2]), aborted, make_turn([5], [6]))
    assert [sample.tokens for sample in trajectory.samples()] == [[1, 2], [5, 6]]
    assert trajectory.counters["aborted"] == 1
    assert trajectory.counters["aborted_tokens"] == 2
    (kept,) = recorded(aborted).samples()
    assert trained(kept) == [8, 9]


def test_parts_that_were_merged_before_are_counted() -> None:
    trajectory = recorded(make_turn([1], [2, 3]))
    trajectory.note("merged", 2)
    assert trajectory.counters == {"clean": 1, "merged": 2}


def test_turns_count_in_the_order_in_which_they_began() -> None:
    first, second = make_turn([1], [2], began_s=1.0), make_turn([1, 2, 3], [4], began_s=2.0)
    trajectory = recorded(second, first)
    trajectory.note("merged", 1)
    (sample,) = trajectory.samples()
    assert (sample.tokens, sample.loss_mask) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert trajectory.counters == {"clean": 2, "merged": 1}
    assert trajectory.turns() == [first, second]


def test_a_turn_without_ids_leaves_one_sample_without_tokens() -> None:
    untold = make_turn(None, None, reply={"role": "assistant", "content": "last"}, versions=[VersionSpan("4", 0, 0)])
    for turns in ([make_turn([1], [2]), untold], [untold, make_turn([1], [2], reply=untold.reply)]):
        trajectory = recorded(*turns)
        (told,) = [sample.fields() for sample in trajectory.samples()]
        assert told == {"messages": [*untold.messages, untold.reply], "weight_version": 4, "retokenized": True}
        assert trajectory.counters == {"clean": 1, "untold": 1}


def test_no_turn_is_no_sample() -> None:
    assert Trajectory().samples() == []


def test_tokens_without_a_logprob_are_not_trained_on() -> None:
    (sample,) = recorded(make_turn([1], [2, 3], logprobs=[math.nan, -1.0])).samples()
    assert (sample.loss_mask, sample.logprobs) == ([0, 0, 1], [0.0, 0.0, -1.0])


@pytest.mark.parametrize("logprobs", [None, [math.nan]])
def test_a_turn_without_any_logprobs_is_not_trained_on(logprobs: list[float] | None) -> None:
    trajectory = recorded(make_turn([1], [2]), make_turn([1, 2, 3], [4], logprobs=logprobs))
    (sample,) = trajectory.samples()
    assert (sample.loss_mask, sample.logprobs) == ([0, 1, 0, 0], [0.0, -0.1, 0.0, 0.0])
    assert trajectory.counters["unscored_tokens"] == 1


def test_where_no_logprob_was_asked_for_the_trainer_has_its_own() -> None:
    turns = [make_turn([1], [2], logprobs=None), make_turn([1, 2, 3], [4], logprobs=None)]
    trajectory = recorded(*turns)
    (sample,) = trajectory.samples()
    assert sample.loss_mask == [0, 1, 0, 1]
    assert "logprobs" not in sample.fields()
    assert "unscored_tokens" not in trajectory.counters


def test_a_part_without_logprobs_costs_the_other_part_none() -> None:
    """As a stream that was aborted before anything was told of its tokens, and gone on with."""
    first = make_turn([1], [2], logprobs=None, finish_reason="abort")
    (sample,) = recorded(first, make_turn([1, 2], [3, 4])).samples()
    assert (sample.loss_mask, sample.logprobs) == ([0, 0, 1, 1], [0.0, 0.0, -0.1, -0.2])


def test_spans_say_how_each_part_was_sampled() -> None:
    warm, plain = SamplingSpan({"temperature": 0.5}, 0, 1), SamplingSpan({}, 0, 2)
    first = make_turn([1], [2], finish_reason="abort", sampling=[warm], versions=[VersionSpan("7", 0, 1)])
    rest = make_turn([1, 2], [3, 4], sampling=[plain], versions=[VersionSpan("7", 0, 1), VersionSpan("8", 1, 2)])
    (sample,) = recorded(first, rest, make_turn([1, 2, 3, 4], [5])).samples()
    told = [(s.start, s.end, s.weight_version, s.sampling) for s in sample.token_spans if s.source == "llm"]
    assert told == [(1, 2, 7, {"temperature": 0.5}), (2, 3, 7, {}), (3, 4, 8, {}), (4, 5, None, None)]
    assert_covered(sample)


def test_messages_stay_as_they_were_sent() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "before"}]
    trajectory = recorded(make_turn([1], [2], messages=messages))
    messages[0]["content"] = "after"
    messages.append({"role": "user", "content": "more"})
    assert trajectory.samples()[0].messages[0]["content"] == "before"
    assert len(trajectory.turns()[0].messages) == 1


def test_a_record_on_disk_gives_the_same_samples() -> None:
    turns = [make_turn([1], [2, 3, 4]), make_turn([1, 2, 3, 9], [5]), make_turn([7], [8])]
    stored = msgspec.json.encode(recorded(*turns).turns())
    again = recorded(*msgspec.json.decode(stored, type=list[type(turns[0])]))  # type: ignore[misc]
    assert again.samples() == recorded(*turns).samples()


def test_two_images_of_one_size_are_two_samples() -> None:
    # The engine's placeholder tokens depend on the size of an image alone.
    def shown(*screens: str) -> list[dict[str, Any]]:
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{screen}"}} for screen in screens]
        return [{"role": "user", "content": [part, {"type": "text", "text": "go"}]} for part in parts]

    first = make_turn([1, 9, 9, 2], [3], messages=shown("AAAA"))
    next_screen = make_turn([1, 9, 9, 2, 3, 9, 9, 2], [4], messages=shown("AAAA", "CCCC"))
    other = make_turn([1, 9, 9, 2, 3, 9, 9, 2], [5], messages=shown("BBBB", "CCCC"))
    trajectory = recorded(first, next_screen, other)
    samples = trajectory.samples()
    assert [sample.tokens for sample in samples] == [[1, 9, 9, 2, 3, 9, 9, 2, 4], [1, 9, 9, 2, 3, 9, 9, 2, 5]]
    assert [sample.messages[:-1] for sample in samples] == [shown("AAAA", "CCCC"), shown("BBBB", "CCCC")]
    assert [trained(sample) for sample in samples] == [[3, 4], [5]]
    assert trajectory.counters == {"clean": 2, "forked": 1}
