"""What holds for every rollout, however its prompts drift."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.capture.sample_fields import CapturedSample
from forebay.engines.capture.trajectory import Drift, Trajectory
from forebay.engines.capture.turn import Turn, VersionSpan
from tests.engines.capture.kit import assert_covered, make_turn, recorded

IDS = st.lists(st.integers(0, 2), max_size=5)
"""Few tokens, so that different branches often look alike."""


@st.composite
def rollouts(draw: st.DrawFn) -> list[Turn]:
    """Turns whose prompts go on from earlier ones, are cut or changed on the way, or are new."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = _prompt(draw, turns)
        for choice in range(draw(st.sampled_from([1, 1, 1, 2]))):
            turns.append(_turn(draw, prompt, choice, first=sum(len(turn.sampled_ids or ()) for turn in turns)))
    return turns


def _prompt(draw: st.DrawFn, turns: list[Turn]) -> list[int]:
    if not turns or draw(st.integers(0, 5)) == 0:
        return draw(IDS.filter(bool))
    before = draw(st.sampled_from(turns))
    held = [*(before.prompt_ids or ()), *(before.sampled_ids or ())]
    cut = draw(st.one_of(st.just(len(held)), st.integers(1, len(held))))
    return held[:cut] + draw(IDS)


def _turn(draw: st.DrawFn, prompt: list[int], choice: int, first: int) -> Turn:
    """Each sampled token has a logprob of its own, by which it is known again."""
    sampled = draw(IDS)
    numbers = [-1.0 - first - place for place in range(len(sampled))]
    reason = draw(st.sampled_from(["stop", "length", "abort"]))
    versions = [VersionSpan(str(draw(st.integers(0, 3))), 0, len(sampled))]
    return make_turn(prompt, sampled, logprobs=numbers, finish_reason=reason, versions=versions, choice=choice)


def trained_numbers(sample: CapturedSample) -> list[float]:
    assert sample.logprobs is not None
    assert sample.loss_mask is not None
    return [number for number, bit in zip(sample.logprobs, sample.loss_mask, strict=True) if bit]


@given(rollouts())
def test_each_sampled_token_is_trained_on_once_but_for_those_that_are_counted(turns: list[Turn]) -> None:
    trajectory = recorded(*turns)
    times = Counter(number for sample in trajectory.samples() for number in trained_numbers(sample))
    assert set(times.values()) <= {1}
    counters = trajectory.counters
    num_sampled = sum(len(turn.sampled_ids or ()) for turn in turns)
    assert len(times) == num_sampled - counters["realigned_tokens"] - counters["aborted_tokens"]


@given(rollouts())
def test_what_is_trained_on_stands_behind_the_very_tokens_that_it_was_sampled_after(turns: list[Turn]) -> None:
    sequences = {
        number: [*(turn.prompt_ids or ()), *(turn.sampled_ids or ())[: place + 1]]
        for turn in turns
        for place, number in enumerate(turn.logprobs or ())
    }
    for sample in recorded(*turns).samples():
        assert sample.tokens is not None
        assert sample.logprobs is not None
        for place, number in enumerate(sample.logprobs):
            assert number == 0.0 or sample.tokens[: place + 1] == sequences[number]


@given(rollouts())
def test_spans_cover_every_token_and_tell_what_was_sampled(turns: list[Turn]) -> None:
    versions = {n: int(turn.versions[0].version) for turn in turns for n in turn.logprobs or ()}
    for sample in recorded(*turns).samples():
        assert_covered(sample)
        assert sample.logprobs is not None
        for span in sample.token_spans:
            numbers = sample.logprobs[span.start : span.end]
            assert all((number < 0) == (span.source == "llm") for number in numbers)
            assert {versions[number] for number in numbers if number < 0} <= {span.weight_version}


@given(rollouts())
def test_every_turn_is_explained_and_the_record_gives_the_same_samples(turns: list[Turn]) -> None:
    trajectory = Trajectory()
    drifts = Counter(trajectory.add(turn) for turn in turns)
    counters = trajectory.counters
    assert counters["clean"] + counters["merged"] == drifts[Drift.CLEAN]
    assert (counters["realigned"], counters["forked"]) == (drifts[Drift.REALIGNED], drifts[Drift.FORK])
    again = recorded(*trajectory.turns())
    assert again.samples() == trajectory.samples()
