"""Which groups slime's rollout function takes, and what becomes of the others."""

from typing import Any

import pytest

from forebay.client import slime
from forebay.core.errors import InvalidInput, RunEnded
from tests.client.slime.kit import generate, group, instances
from tests.conftest import MakeServer
from tests.kit import FAILS_WITH_A_HINT, NativeRun, ServerProcess, poll_until, write_generator


def test_groups_of_another_size_are_passed_over_and_told(
    slime_server: ServerProcess, name: str, args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = slime_server.start_run("ragged", name=name, group_size=3, min_valid_item_size_ratio=0.3)
    args.rollout_task_type, args.n_samples_per_prompt, args.global_batch_size = "ragged", 3, 6
    short = group("short", count=3)
    short[1]["extra_info"] = {"drop": True}
    untrainable = group("untrainable", count=3, tokens=[1], loss_mask=[1], logprobs=...)
    for each in (short, group("a", count=3), untrainable, group("b", count=3), group("c", count=3)):
        run.write(*each)
    output = slime.generate_rollout(args, 0, object())
    assert instances(output.samples) == ["a", "b"]
    assert output.metrics["rollout/forebay/unusable_groups"] == 2
    assert output.metrics["rollout/forebay/total_samples"] == 15
    assert "skipping a group of 'short': it has 2 samples, n_samples_per_prompt is 3" in caplog.text
    assert "skipping a group of 'untrainable': sample 'untrainable/0': it has fewer than two tokens" in caplog.text
    assert run.view()["groups"] == {"open": 0, "ready": 1, "leased": 0, "acked": 4, "discarded": 0}


def test_when_slime_can_use_nothing_it_ends_and_nothing_is_taken(run: NativeRun, args: Any) -> None:
    for number in range(10):
        run.write(*group(f"g{number}", tokens=[1], loss_mask=[1], logprobs=...))
    with pytest.raises(InvalidInput, match=r"none of 10 groups; the last, 'g9': .* fewer than two tokens"):
        generate(args, 0)
    assert run.view()["groups"]["ready"] == 10
    assert run.view()["checkpoints"] == []


def test_no_more_groups_are_taken_than_are_trained_on(run: NativeRun, args: Any) -> None:
    for number in range(5):
        run.write(*group(f"g{number}"))
    assert instances(generate(args, 0)) == ["g0", "g1"]
    assert instances(generate(args, 1)) == ["g2", "g3"]
    assert run.view()["groups"]["ready"] == 1
    checkpoints = run.client.get(f"{run.path}/checkpoints").json()["checkpoints"]
    assert [(each["step"], each["num_groups"]) for each in checkpoints] == [(0, 2), (1, 2)]


def test_the_end_of_a_run_is_told_and_leaves_what_is_there(run: NativeRun, args: Any) -> None:
    run.write(*group("a"))
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    with pytest.raises(RunEnded, match=r"is stopped \(.*\): 1 groups are left, step 0 needs 2") as ended:
        generate(args, 0)
    assert "--num-epoch" in ended.value.hint
    assert run.view()["groups"]["ready"] == 1


def test_a_run_that_ended_with_nothing_left_says_so(run: NativeRun, args: Any) -> None:
    run.write(*group("a"), *group("b"))
    generate(args, 0)
    run.stop()
    with pytest.raises(RunEnded, match="0 groups are left, step 1 needs 2"):
        generate(args, 1)


def test_of_a_run_that_failed_the_error_is_told(make_server: MakeServer, args: Any) -> None:
    server = make_server(max_restarts=0)
    write_generator(server.generators, FAILS_WITH_A_HINT, "hints_generator.py")
    args.rollout_buffer_url, args.rollout_task_type = server.url, "hints"
    with pytest.raises(RunEnded, match=r"is failed \(.*no such dataset\)"):
        generate(args, 0)
