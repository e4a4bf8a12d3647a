"""Evaluation over slime's rollout function: a run of its own in which every sample counts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.client import slime
from forebay.core.errors import InvalidInput
from tests.kit import ServerProcess


def test_evaluation_is_a_run_of_its_own_in_which_every_sample_counts(
    args: Any, exam: Callable[..., str], slime_server: ServerProcess
) -> None:
    args.eval_prompt_data = ["exam", exam(a=[1, 1], b=[1, None], c=[0, 0], d=[None, None])]
    args.n_samples_per_eval_prompt, args.eval_temperature = 2, 0.0
    args.eval_max_response_len = 99
    args.rollout_buffer_settings = {"max_buffer_size": 1, "sampling_params": {"stop": ["!"]}}
    name = f"{args.rollout_buffer_name[:58]}-eval"
    slime_server.start_run(name=name)  # a training that was ended meanwhile left it
    output = slime.generate_rollout(args, 4, object(), evaluation=True)
    told = output.data["exam"]
    assert told["rewards"] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert told["truncated"] == [True] * 5
    assert [sample.index for sample in told["samples"]] == list(range(5))
    assert "'temperature': 0.0" in told["samples"][0].response
    assert "'max_tokens': 99" in told["samples"][0].response
    assert "'stop': ['!']" in told["samples"][0].response
    assert output.metrics == {"eval/exam/failed_samples": 3}
    runs = slime_server.client.get("/v1/runs").json()["runs"]
    assert [run["state"] for run in runs if run["name"] == name] == ["stopped", "finished"]


def test_a_pass_rate_counts_whole_groups(args: Any, exam: Callable[..., str]) -> None:
    path = exam(a=[1, 1, 1], b=[1, 1, None])
    args.eval_datasets = [SimpleNamespace(name="one", path=path, n_samples_per_eval_prompt=3)]
    args.log_passrate = True
    assert slime.generate_rollout(args, 0, object(), evaluation=True).data["one"]["rewards"] == [1.0] * 3


def test_there_must_be_something_to_evaluate_on(args: Any) -> None:
    with pytest.raises(InvalidInput, match="nothing to evaluate on"):
        slime.generate_rollout(args, 0, object(), evaluation=True)
