"""slime's rollout function on a real server: what slime trains on."""

from pathlib import Path
from typing import Any

import pytest

from forebay.client import slime
from forebay.client.slime import samples
from forebay.engines.tiny.model import build_tokenizer
from forebay.engines.tiny.recipe import Recipe
from tests.client import slime_stand_in
from tests.client.slime.kit import generate, group
from tests.client.slime_stand_in import Sample
from tests.kit import Json, NativeRun, ServerProcess, make_sample


def test_a_sample_has_what_slime_trains_on(run: NativeRun, args: Any) -> None:
    parts = {"exact": 1.0}
    changes = {
        "weight_versions": [3, 4],
        "label": "4",
        "reward_parts": parts,
        "extra_info": {"finish_reason": "stop", "round_number": 2},
    }
    run.write(*group("a", **changes), *group("b", **changes))
    (first, second), other = generate(args, 7)
    assert first == Sample(
        group_index=14,
        index=28,
        rollout_id=28,
        prompt=[{"role": "user", "content": "2+2?"}],
        response="4",
        tokens=[5, 6, 7, 8],
        response_length=2,
        loss_mask=[1, 1],
        rollout_log_probs=[-0.5, -0.25],
        label="4",
        reward=0.0,
        weight_versions=["3", "4"],
        status=Sample.Status.COMPLETED,
        metadata={
            "finish_reason": "stop",
            "round_number": 2,
            "uid": "a/0",
            "instance_id": "a",
            "raw_reward": 0.0,
            "reward_parts": parts,
            "retokenized": False,
        },
    )
    assert [sample.index for sample in (first, second, *other)] == [28, 29, 30, 31]
    assert [sample.group_index for sample in (first, second, *other)] == [14, 14, 15, 15]


@pytest.mark.parametrize(
    ("told", "response_length", "loss_mask"),
    [
        ({"loss_mask": [0, 1, 0, 1]}, 3, [1, 0, 1]),
        ({"loss_mask": [0, 0, 0, 1], "response_length": 3}, 3, [0, 0, 1]),
        ({"loss_mask": [1, 1], "logprobs": [-0.5, -0.25], "response_length": 2}, 2, [1, 1]),
        ({"loss_mask": ..., "response_length": 1}, 1, [1]),
        ({"loss_mask": ...}, 3, [1, 1, 1]),
        ({"loss_mask": [0, 0, 0, 0]}, 1, [0]),
    ],
)
def test_the_response_begins_where_the_sample_says_or_where_training_does(
    run: NativeRun, args: Any, told: Json, response_length: int, loss_mask: list[int]
) -> None:
    run.write(*group("a", **told), *group("b", **told))
    sample = generate(args, 0)[0][0]
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([5, 6, 7, 8], response_length, loss_mask)
    assert sample.rollout_log_probs == [
        logprob if mask else 0.0
        for logprob, mask in zip([0.0, 0.0, -0.5, -0.25][-response_length:], loss_mask, strict=True)
    ]


@pytest.mark.parametrize(
    ("extra_info", "status"),
    [
        ({"finish_reason": "length"}, "TRUNCATED"),
        ({"finish_reason": "abort"}, "ABORTED"),
        ({"finish_reason": {"type": "abort", "message": "closed"}}, "ABORTED"),
        ({"finish_reason": "error"}, "FAILED"),
        ({"finish_reason": "tool_calls"}, "COMPLETED"),
        ({}, "COMPLETED"),
    ],
)
def test_the_end_of_a_rollout_is_its_status(extra_info: Json, status: str) -> None:
    assert samples.status_of(make_sample(extra_info=extra_info)) == status


def test_a_failed_sample_is_failed_whatever_its_reason() -> None:
    assert samples.status_of(make_sample(status="failed", extra_info={"finish_reason": "length"})) == "FAILED"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("ok", "COMPLETED"),
        ("truncated", "TRUNCATED"),
        ("cancelled", "ABORTED"),
        *((f"{whose}_failure", "FAILED") for whose in ("engine", "agent", "environment", "judge")),
        ("anything else", "COMPLETED"),
    ],
)
def test_the_outcome_of_a_rollout_is_its_status(outcome: str, status: str) -> None:
    assert samples.status_of(make_sample(outcome=outcome)) == status
    if outcome == "ok":
        aborted = make_sample(outcome=outcome, extra_info={"finish_reason": "abort"})
        assert samples.status_of(aborted) == "ABORTED"


def test_rewards_are_raw_for_slime_to_normalise_unless_it_is_told_not_to(run: NativeRun, args: Any) -> None:
    for number in range(3):
        run.write(*group(f"{number}a"), *group(f"{number}b"))
    raw = generate(args, 0)[0]
    assert [sample.reward for sample in raw] == [0.0, 1.0]
    args.rewards_normalization = False
    normalised = generate(args, 1)[0]
    assert [sample.reward for sample in normalised] == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert [sample.metadata["raw_reward"] for sample in normalised] == [0.0, 1.0]
    args.reward_key = "score"
    keyed = generate(args, 2)[0]
    assert [sample.reward for sample in keyed] == [{"score": pytest.approx(-1.0)}, {"score": pytest.approx(1.0)}]


def test_each_slot_is_a_rollout_of_its_own(slime_server: ServerProcess, name: str, args: Any) -> None:
    run = slime_server.start_run(name=name, group_size=4, min_valid_item_size_ratio=0.5, group_timeout_seconds=0.3)
    args.n_samples_per_prompt, args.rollout_batch_size = 4, 1
    run.write(*[{**sample, "rollout_id": told} for sample, told in zip(group("a", count=4), "xyyz", strict=True)])
    assert [sample.rollout_id for sample in generate(args, 0)[0]] == [0, 1, 2, 3]
    run.write(*[{**sample, "rollout_id": told} for sample, told in zip(group("b", count=3), "xyz", strict=True)])
    padded = generate(args, 1)[0]
    assert [sample.metadata["uid"] for sample in padded] == ["b/0", "b/1", "b/2", "b/0"]
    assert [sample.rollout_id for sample in padded] == [4, 5, 6, 7]


def with_forks(name: str, num_forks: int, *failed: int) -> list[Json]:
    """A group of four slots, of which the first has forks and those in ``failed`` have failed."""
    made = []
    for slot, sample in enumerate(group(name, count=4)):
        place = {"epoch": 0, "slot": slot, "rollout_id": f"{name}-{slot}"}
        forks = range(1, num_forks + 1) if slot == 0 else ()
        made += [{**sample, **place, "uid": f"{name}/f{fork}", "fork": fork} for fork in forks]
        is_failed = {"status": "failed", "reward": None} if slot in failed else {}
        made.append({**sample, **place, **is_failed})
    return made


def test_forks_go_out_beside_their_main_samples(slime_server: ServerProcess, name: str, args: Any) -> None:
    run = slime_server.start_run(name=name, group_size=4)
    args.n_samples_per_prompt, args.global_batch_size = 4, 8
    run.write(*with_forks("a", 2), *with_forks("b", 0))
    output = slime.generate_rollout(args, 0, None)
    uids = [[[sample.metadata["uid"] for sample in slot] for slot in group] for group in output.samples]
    assert uids == [[["a/0", "a/f1", "a/f2"], ["a/1"], ["a/2"], ["a/3"]], [["b/0"], ["b/1"], ["b/2"], ["b/3"]]]
    data = slime_stand_in.train_data(args, output)
    assert len(set(data["sample_indices"])) == 10
    assert data["rollout_ids"] == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert output.metrics["rollout/forebay/forks"] == 2


@pytest.mark.parametrize("task", ["ragged", "idle"])
def test_a_fork_never_stands_in_a_failed_slot(slime_server: ServerProcess, name: str, args: Any, task: str) -> None:
    run = slime_server.start_run(task, name=name, group_size=4, min_valid_item_size_ratio=0.5)
    args.n_samples_per_prompt, args.global_batch_size, args.rollout_batch_size = 4, 4, 1
    args.rollout_task_type = task
    run.write(*with_forks("a", 2, 2))
    output = slime.generate_rollout(args, 0, None)
    uids = [[sample.metadata["uid"] for sample in slot] for slot in output.samples[0]]
    assert uids == [["a/0", "a/f1", "a/f2"], ["a/1"], ["a/3"], ["a/0"]]
    data = slime_stand_in.train_data(args, output)
    assert [sum(mask) > 0 for mask in data["loss_masks"]] == [True] * 5 + [False]
    assert data["rollout_ids"] == [0, 0, 0, 1, 2, 3]
    assert output.metrics["rollout/forebay/filled_slots"] == 1


def test_slots_are_filled_however_few_forks_there_are(slime_server: ServerProcess, name: str, args: Any) -> None:
    run = slime_server.start_run("ragged", name=name, group_size=4, min_valid_item_size_ratio=0.5)
    args.n_samples_per_prompt, args.global_batch_size, args.rollout_batch_size = 4, 4, 1
    args.rollout_task_type = "ragged"
    run.write(*with_forks("a", 1, 1, 2))
    output = slime.generate_rollout(args, 0, None)
    assert [len(slot) for slot in output.samples[0]] == [2, 1, 1, 1]
    assert output.metrics["rollout/forebay/filled_slots"] == 2
    slime_stand_in.train_data(args, output)


def test_logprobs_are_all_there_or_none(run: NativeRun, args: Any) -> None:
    run.write(*group("a"), *group("b", logprobs=...))
    assert [sample.rollout_log_probs for group in generate(args, 0) for sample in group] == [None] * 4


def test_what_slime_wants_of_all_or_none_is_left_out_if_one_lacks_it(run: NativeRun, args: Any) -> None:
    run.write(*group("a", extra_info={"round_number": 1}), *group("b"))
    assert all("round_number" not in sample.metadata for group in generate(args, 0) for sample in group)


def test_samples_without_tokens_are_tokenised_with_slimes_tokenizer(run: NativeRun, args: Any, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(Recipe())
    tokenizer.save_pretrained(tmp_path)
    args.hf_checkpoint = str(tmp_path)
    run.write(*group("a", tokens=..., loss_mask=..., logprobs=...), *group("b"))
    (made, _), (kept, _) = generate(args, 0)
    assert tokenizer.decode(made.tokens) == tokenizer.apply_chat_template(
        [*made.prompt, {"role": "assistant", "content": "4"}], tokenize=False
    )
    trained = [
        token for token, mask in zip(made.tokens[-made.response_length :], made.loss_mask or [], strict=True) if mask
    ]
    assert tokenizer.decode(trained) == "4<|im_end|>"
    assert (made.metadata["retokenized"], kept.metadata["retokenized"]) == (True, False)
    assert kept.tokens == [5, 6, 7, 8]


def test_what_foreign_writers_call_by_our_names_makes_nothing_of_their_samples(
    slime_server: ServerProcess, name: str, args: Any
) -> None:
    theirs = slime_server.start_slime(name[:60] + ".", group_size=2)
    args.rollout_buffer_name = name[:60] + "."
    for each in (*group("a"), *group("b")):
        theirs.send({**each, "rollout_id": "same", "fork": 1, "outcome": "truncated"})
    (first, second), _ = generate(args, 0)
    assert first.rollout_id != second.rollout_id
    assert (first.status, second.status) == (Sample.Status.COMPLETED,) * 2
