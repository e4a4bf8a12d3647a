"""Rows that an engine returns beside the tokens, on their way from replies into the parts of samples."""

import base64
import resource
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from forebay.core.starts.asked_arrays import AskedArrays
from forebay.engines.capture.read_reply import turns_of_chat
from forebay.engines.capture.trajectory import Trajectory
from forebay.engines.capture.turn import Turn
from tests.engines.arrays_flows import Recorded

WIDTH = 3
ROUTED = AskedArrays(routed_experts=True)
NEGATIVE = base64.b64encode(array("i", [-1] * 9).tobytes()).decode()
Messages = list[dict[str, Any]]


def routes(ids: Sequence[int], weights: int = 0, top: int = 0) -> list[list[int]]:
    """The experts of each token: they depend on all tokens up to it, and on the weights."""
    rows, state = [], weights
    for token in ids:
        state = (state * 31 + token + 1) % 251
        rows.append([state, token % 251, top + weights])
    return rows


def answered(prompt: Sequence[int], sampled: Sequence[int], start: int = 0, **given: Any) -> Turn:
    """The turn of a chat that SGLang answers with its routes from ``start`` on."""
    messages = given.pop("messages", [{"role": "user", "content": str(list(prompt))}])
    ids = [*prompt, *sampled]
    rows = given.pop("rows", routes(ids)[:-1])[start:]
    encoded = base64.b64encode(array("i", [number for row in rows for number in row]).tobytes()).decode()
    meta_info = {"output_token_logprobs": [[-0.5, token, None] for token in sampled], "routed_experts": encoded}
    choice = {
        "message": {"role": "assistant", "content": given.pop("said", str(list(sampled)))},
        "prompt_token_ids": list(prompt),
        "response_token_ids": list(sampled),
        "finish_reason": given.pop("finish_reason", "stop"),
        "meta_info": {**meta_info, **given},
    }
    body = {"messages": messages, "return_routed_experts": True, "routed_experts_start_len": start}
    return turns_of_chat(body, {"choices": [choice]})[0]


def delivered(trajectory: Trajectory) -> list[tuple[list[int], dict[int, list[int]]]]:
    """The tokens of each sample, and the routes of those that have any."""
    samples = trajectory.sample_fields()
    parts = {part.digest: part.data for each in samples for part in each.get("parts", ())}
    named = [{**each, "parts": [part.digest for part in each.get("parts", ())]} for each in samples]
    return [(each["tokens"], rows) for each, rows in zip(samples, Recorded(named, parts).routes, strict=True)]


def assert_exact(trajectory: Trajectory) -> None:
    for tokens, rows in delivered(trajectory):
        assert rows == dict(enumerate(routes(tokens)[:-1]))


def recorded(*turns: Turn) -> Trajectory:
    trajectory = Trajectory(arrays=ROUTED)
    for turn in turns:
        trajectory.add(turn)
    return trajectory


def test_the_first_rows_win_and_a_missing_row_is_missing() -> None:
    first = answered([1, 2], [3, 4])
    other = answered([1, 2, 3, 4, 5, 6], [7], start=4, rows=routes([1, 2, 3, 4, 5, 6], weights=1))
    trajectory = recorded(first, other)
    (_, rows) = delivered(trajectory)[0]
    assert list(rows) == [0, 1, 2, 4, 5]
    assert [rows[token] for token in range(3)] == routes([1, 2, 3])
    assert rows[5] == routes([1, 2, 3, 4, 5, 6], weights=1)[5]
    assert trajectory.counters == {"clean": 2, "unrouted_tokens": 1}


def test_an_expert_above_255_widens_all_rows_of_the_rollout() -> None:
    first = answered([1, 2], [3])
    second = answered([1, 2, 3, 4], [5], start=2, rows=routes([1, 2, 3, 4], top=300))
    (_, rows) = delivered(recorded(first, second))[0]
    assert rows == {0: routes([1])[0], 1: routes([1, 2])[1], **dict(enumerate(routes([1, 2, 3, 4], top=300)[2:], 2))}


def test_rows_that_a_retracted_call_computed_again_are_dropped() -> None:
    versions = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    turn = answered([1, 2], [3, 4, 5, 6], weight_versions=versions, num_retractions=1)
    trajectory = recorded(turn)
    assert [list(rows) for _, rows in delivered(trajectory)] == [[3, 4]]
    assert trajectory.counters == {"clean": 1, "unrouted_tokens": 3, "rerouted_tokens": 3}


@pytest.mark.parametrize("encoded", ["no base64!", "AAAA", base64.b64encode(bytes(13)).decode(), NEGATIVE, None])
def test_malformed_rows_are_missing_and_the_turn_stays(encoded: str | None) -> None:
    trajectory = recorded(answered([1, 2], [3, 4], routed_experts=encoded))
    assert delivered(trajectory) == [([1, 2, 3, 4], {})]
    assert trajectory.counters == {"clean": 1, "unrouted_tokens": 3}


def test_many_rows_lie_in_a_file_and_come_back() -> None:
    prompt = [number % 250 for number in range(400_000)]
    assert_exact(recorded(answered(prompt, [1]), answered([*prompt, 1, 2], [3], start=400_000)))


def test_a_prompt_is_asked_for_its_new_rows() -> None:
    said: Messages = [{"role": "user", "content": "go"}]
    reply = {"role": "assistant", "content": "5"}
    trajectory = recorded(answered(range(100), [1, 2, 3], messages=said, said="5"))

    def first(*messages: Mapping[str, Any]) -> object:
        return trajectory.asking_rows({"messages": list(messages)})["routed_experts_start_len"]

    assert first(*said, reply, {"role": "user", "content": "on"}) == 102
    # The template may show what is not the reply in another way, from the end of the prompt on.
    assert first(*said, {"role": "assistant", "content": "6"}) == first(*said) == 100 - 1 - 16
    assert first({"role": "user", "content": "other"}) == 0


def test_turns_keep_their_rows() -> None:
    trajectory = recorded(answered([1, 2, 3], [4, 5]), answered([1, 2, 3, 4, 5, 6], [7], start=4))
    assert_exact(recorded(*trajectory.turns()))


def test_rows_of_another_model_are_not_shared() -> None:
    judge = answered([1, 2, 3], [4], rows=routes([1, 2, 3], weights=1))
    judge = msgspec.structs.replace(judge, model="judge")
    policy = msgspec.structs.replace(answered([1, 2, 3], [5]), model="policy")
    trajectory = recorded(judge, policy)
    said = {"messages": policy.messages, "model": "other"}
    assert trajectory.asking_rows(said)["routed_experts_start_len"] == 0
    *_, (tokens, rows) = delivered(trajectory)
    assert (tokens, rows) == ([1, 2, 3, 5], dict(enumerate(routes([1, 2, 3]))))


def test_a_repeated_prompt_has_the_row_that_sampled_its_own_answer() -> None:
    first, again = answered([1, 2, 3], [4]), answered([1, 2, 3], [5], rows=routes([1, 2, 3], weights=1))
    (_, old), (_, new) = delivered(recorded(first, again))
    assert old == dict(enumerate(routes([1, 2, 3])))
    assert new == {**old, 2: routes([1, 2, 3], weights=1)[2]}


def test_rows_that_the_disk_does_not_take_are_missing() -> None:
    trajectory = recorded(answered([1, 2], [3]))
    # A limit of the process stands for a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    prompt = [number % 250 for number in range(400_000)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        trajectory.add(answered(prompt, [1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [len(tokens) for tokens, _ in delivered(trajectory)] == [3, 400_001]
    assert trajectory.counters["unrouted_tokens"] == 400_000


@pytest.mark.parametrize("masks", [[[1]], [[1], [2], [3]]])
def test_masks_of_another_number_than_the_tokens_are_missing(masks: list[list[int]]) -> None:
    turn = answered(
        [1, 2], [3, 4], output_token_sampling_mask=masks, output_token_sampling_logprobs=[-0.5] * len(masks)
    )
    assert turn.arrays.keys() == {"routed_experts"}
