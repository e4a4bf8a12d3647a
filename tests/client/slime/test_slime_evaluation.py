"""Evaluation over slime's rollout function: a run of its own in which every sample counts."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.client import slime
from forebay.client.slime.evaluation import WrittenGroups, eval_name
from forebay.core.errors import BodiesGone, InputRefused, InvalidInput
from forebay.core.run import check_name
from tests.client.slime import tasks
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, poll_until

SEGMENT_BYTES = 65_536


def test_evaluation_is_a_run_of_its_own_in_which_every_sample_counts(
    args: Any, exam: Callable[..., str], slime_server: ServerProcess
) -> None:
    args.eval_prompt_data = ["exam", exam(a=[1, 1], b=[1, None], c=[0, 0], d=[None, None])]
    args.n_samples_per_eval_prompt, args.eval_temperature = 2, 0.0
    args.eval_max_response_len = 99
    args.rollout_buffer_settings = {"max_buffer_size": 1, "sampling_params": {"stop": ["!"]}}
    name = eval_name(args)
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
    assert [run["state"] for run in runs if run["name"] == name] == ["finished", "stopped"]


def test_a_pass_rate_counts_whole_groups(args: Any, exam: Callable[..., str]) -> None:
    path = exam(a=[1, 1, 1], b=[1, 1, None])
    args.eval_datasets = [SimpleNamespace(name="one", path=path, n_samples_per_eval_prompt=3)]
    args.log_passrate = True
    assert slime.generate_rollout(args, 0, object(), evaluation=True).data["one"]["rewards"] == [1.0] * 3


def test_there_must_be_something_to_evaluate_on(args: Any) -> None:
    with pytest.raises(InvalidInput, match="no evaluation data set"):
        slime.generate_rollout(args, 0, object(), evaluation=True)


def test_long_names_that_begin_alike_have_evaluations_of_their_own(args: Any) -> None:
    names = []
    for last in "ab":
        args.rollout_buffer_name = "n" * 63 + last
        names.append(check_name(eval_name(args)))
    assert len(set(names)) == 2
    args.rollout_buffer_name = "n" * 59
    assert eval_name(args) == check_name("n" * 59 + "-eval")


def test_an_evaluation_that_was_read_goes_by_the_budget(
    args: Any, exam: Callable[..., str], make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(
        generators=tasks.write_tasks(tmp_path / "tasks"), segment_bytes=SEGMENT_BYTES, max_journal_bytes=SEGMENT_BYTES
    )
    args.rollout_buffer_url, args.n_samples_per_eval_prompt = server.url, 2
    args.eval_prompt_data = ["exam", exam("x" * 20_000, **{name: [1, 0] for name in "abcdef"})]
    told = slime.generate_rollout(args, 0, object(), evaluation=True).data["exam"]
    assert told["rewards"] == [1.0, 0.0] * 6
    [run] = server.client.get("/v1/runs").json()["runs"]
    assert run["groups"] == {"open": 0, "ready": 0, "leased": 0, "acked": 6, "discarded": 0}
    done = server.client.post("/v1/gc").json()
    assert done["num_segments_freed"] >= 2
    assert (done["num_bytes_over"], done["kept"].get("ready", 0)) == (0, 0)
    with closing(WrittenGroups(args, run["run_id"])) as gone, pytest.raises(BodiesGone) as refused:
        list(gone)
    assert "max_journal_bytes" in refused.value.hint


def test_an_evaluation_that_fails_is_kept(args: Any, exam: Callable[..., str], slime_server: ServerProcess) -> None:
    args.n_samples_per_eval_prompt = 2
    args.eval_prompt_data = ["good", exam(a=[1, 0], b=[0, 1]), "bad", "/no/such/file"]
    with pytest.raises(InputRefused, match="/no/such/file"):
        slime.generate_rollout(args, 0, object(), evaluation=True)
    runs = slime_server.client.get("/v1/runs").json()["runs"]
    [run] = [NativeRun(slime_server, run["run_id"]) for run in runs if run["name"] == eval_name(args)]
    assert sorted(row["instance_id"] for row in run.read(num_groups=2)["data"]) == ["a", "a", "b", "b"]


def test_what_a_generator_left_open_holds_up_no_evaluation(
    args: Any, exam: Callable[..., str], slime_server: ServerProcess
) -> None:
    args.n_samples_per_eval_prompt = 4
    args.eval_prompt_data = ["exam", exam(a=[1, 0, 1, 0], b=[1, 1, 0])]
    args.rollout_buffer_settings = {"group_timeout_seconds": 6}
    output = slime.generate_rollout(args, 0, object(), evaluation=True)
    assert output.data["exam"]["rewards"] == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert output.metrics == {"eval/exam/failed_samples": 1}
    groups = poll_until(lambda: _groups_once_ended(slime_server, eval_name(args)))
    assert groups == {"open": 0, "ready": 0, "leased": 0, "acked": 1, "discarded": 1}


def _groups_once_ended(server: ServerProcess, name: str) -> dict[str, int] | None:
    [run] = [run for run in server.client.get("/v1/runs").json()["runs"] if run["name"] == name]
    return run["groups"] if run["has_ended"] else None
