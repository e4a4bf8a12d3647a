"""slime's rollout function on a real server: what slime gets, and what becomes of the groups."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.client import slime, slime_samples
from forebay.client.slime_args import run_name, start_fields
from forebay.core.errors import BodiesGone, InvalidInput, RunEnded, StartRefused
from forebay.engines.tiny.model import build_tokenizer
from forebay.engines.tiny.recipe import Recipe
from tests.client import slime_stand_in
from tests.client.slime_stand_in import Sample
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_sample, poll_until, write_generator

RAGGED = """
import threading
TASK_TYPE = "ragged"

def run_rollout(data):
    threading.Event().wait()

def filter_item(item, task_type):
    return not item["extra_info"].get("drop")

def pad_group_data(group, group_size):
    return group
"""
EXAM = """
import json
from urllib.request import Request, urlopen
TASK_TYPE = "exam"

def run_rollout(data):
    with open(data["input_file"]) as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        for slot in range(data["group_size"]):
            reward = row["rewards"][slot]
            outcome = {"status": "failed", "error": "no answer"} if reward is None else {"reward": reward}
            write(data, {**row, **outcome, "uid": f"{row['instance_id']}/{slot}", "epoch": 0, "slot": slot,
                         "messages": [{"role": "assistant", "content": str(data["sampling_params"])}]})

def write(data, sample):
    body = json.dumps(sample).encode()
    urlopen(Request(data["remote_buffer_url"] + "/buffer/write", body, {"Content-Type": "application/json"})).read()
"""


@pytest.fixture(scope="module")
def slime_server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, RAGGED, "ragged_generator.py")
    write_generator(folder, EXAM, "exam_generator.py")
    return module_servers(generators=folder)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in slime_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    slime.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", ".").replace("]", "")[:64]


@pytest.fixture
def run(slime_server: ServerProcess, name: str) -> NativeRun:
    """A run that the function finds by its name."""
    return slime_server.start_run(name=name, group_size=2)


@pytest.fixture
def args(slime_server: ServerProcess, name: str) -> Any:
    return slime_stand_in.arguments(slime_server.url, rollout_buffer_name=name)


def group(instance_id: str, *, count: int = 2, **changes: Any) -> list[Json]:
    tokens = {"tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25]}
    return [
        make_sample(
            uid=f"{instance_id}/{slot}", instance_id=instance_id, reward=slot / (count - 1), **(tokens | changes)
        )
        for slot in range(count)
    ]


def generate(args: Any, rollout_id: int) -> list[list[Sample]]:
    """What slime makes its training data of, after its own checks."""
    output = slime.generate_rollout(args, rollout_id, object(), evaluation=False)
    slime_stand_in.train_data(args, output)
    return output.samples  # type: ignore[no-any-return]


def instances(samples: list[list[Sample]]) -> list[str]:
    return [group[0].metadata["instance_id"] for group in samples]


# --- samples


def test_a_sample_has_what_slime_trains_on(run: NativeRun, args: Any) -> None:
    changes = {"weight_versions": [3, 4], "label": "4", "extra_info": {"finish_reason": "stop", "round_number": 2}}
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
    assert slime_samples.status_of(make_sample(extra_info=extra_info)) == status


def test_a_failed_sample_is_failed_whatever_its_reason() -> None:
    assert slime_samples.status_of(make_sample(status="failed", extra_info={"finish_reason": "length"})) == "FAILED"


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
    assert slime_samples.status_of(make_sample(outcome=outcome)) == status
    if outcome == "ok":
        aborted = make_sample(outcome=outcome, extra_info={"finish_reason": "abort"})
        assert slime_samples.status_of(aborted) == "ABORTED"


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


def test_forks_share_a_rollout_and_copies_do_not(slime_server: ServerProcess, name: str, args: Any) -> None:
    run = slime_server.start_run(name=name, group_size=4, min_valid_item_size_ratio=0.5, group_timeout_seconds=0.3)
    args.n_samples_per_prompt, args.rollout_batch_size = 4, 1
    forks = [{**sample, "rollout_id": told} for sample, told in zip(group("a", count=4), "xyyz", strict=True)]
    run.write(*forks)
    assert [sample.rollout_id for sample in generate(args, 0)[0]] == [0, 1, 1, 3]
    run.write(*[{**sample, "rollout_id": told} for sample, told in zip(group("b", count=3), "xyz", strict=True)])
    padded = generate(args, 1)[0]
    assert [sample.metadata["uid"] for sample in padded] == ["b/0", "b/1", "b/2", "b/0"]
    assert [sample.rollout_id for sample in padded] == [4, 5, 6, 7]


def test_forks_that_fill_no_slot_are_left_out_of_slimes_groups(run: NativeRun, args: Any) -> None:
    for name in "ab":
        first, second = group(name)
        place = {"epoch": 0, "rollout_id": "r0", "slot": 0}
        run.write(
            {**first, **place, "uid": f"{name}/f1", "fork": 1}, {**first, **place}, {**second, "epoch": 0, "slot": 1}
        )
    samples = generate(args, 0)
    assert [[sample.metadata["uid"] for sample in group] for group in samples] == [["a/0", "a/1"], ["b/0", "b/1"]]


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


# --- groups


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
    assert "'short' is passed over: it has 2 samples, n_samples_per_prompt is 3" in caplog.text
    assert "'untrainable' is passed over: sample 'untrainable/0': it has less than two tokens" in caplog.text
    assert run.view()["groups"] == {"open": 0, "ready": 1, "leased": 0, "acked": 4, "discarded": 0}


def test_when_slime_can_use_nothing_it_ends_and_nothing_is_taken(run: NativeRun, args: Any) -> None:
    for number in range(10):
        run.write(*group(f"g{number}", tokens=[1], loss_mask=[1], logprobs=...))
    with pytest.raises(InvalidInput, match=r"none of 10 groups; of 'g9': .* less than two tokens"):
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
    with pytest.raises(RunEnded, match=r"is stopped \(.*\): 1 groups are left, rollout 0 needs 2") as ended:
        generate(args, 0)
    assert "--num-epoch" in ended.value.hint
    assert run.view()["groups"]["ready"] == 1


def test_a_run_that_ended_with_nothing_left_says_so(run: NativeRun, args: Any) -> None:
    run.write(*group("a"), *group("b"))
    generate(args, 0)
    run.stop()
    with pytest.raises(RunEnded, match="0 groups are left, rollout 1 needs 2"):
        generate(args, 1)


# --- going on


@pytest.mark.parametrize(
    ("start_rollout_id", "expected"), [(0, ["g0", "g1"]), (1, ["g2", "g3"]), (3, ["g6", "g7"]), (9, ["g6", "g7"])]
)
def test_a_new_process_goes_on_behind_the_model_that_it_has(
    run: NativeRun, args: Any, start_rollout_id: int, expected: list[str]
) -> None:
    for number in range(10):
        run.write(*group(f"g{number}"))
    for rollout_id in range(3):
        generate(args, rollout_id)
    slime.close()
    assert instances(generate(args, start_rollout_id)) == expected


def test_a_rollout_that_is_asked_for_again_is_the_same(run: NativeRun, args: Any) -> None:
    for number in range(4):
        run.write(*group(f"g{number}"))
    first = generate(args, 0)
    assert generate(args, 1) != first
    assert generate(args, 0) == first


def test_a_rollout_that_failed_on_the_way_has_taken_nothing(
    run: NativeRun, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        run.write(*group(f"g{number}"))
    generate(args, 0)
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "slime.utils.types")
        with pytest.raises(ModuleNotFoundError):
            generate(args, 1)
    assert run.view()["groups"]["ready"] == 2
    assert instances(generate(args, 1)) == ["g2", "g3"]


# --- starting


@pytest.fixture
def started(slime_server: ServerProcess, args: Any) -> Callable[[], list[Json]]:
    def runs() -> list[Json]:
        everything: list[Json] = slime_server.client.get("/v1/runs").json()["runs"]
        return [run for run in everything if run["name"] == args.rollout_buffer_name]

    return runs


@pytest.fixture
def exam(tmp_path: Path, args: Any) -> Callable[..., str]:
    """Writes the input of the exam: for each instance the rewards of its samples, None for one that fails."""

    def write(ballast: str = "", **rewards: list[float | None]) -> str:
        head = {"tokens": [1, 2, 3], "extra_info": {"finish_reason": "length"}, "ballast": ballast}
        rows = [{"instance_id": name, "rewards": each, **head} for name, each in rewards.items()]
        path = tmp_path / "exam.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    args.rollout_task_type = "exam"
    return write


def test_the_first_rollout_starts_a_run_as_the_arguments_say(
    args: Any, exam: Callable[..., str], started: Callable[[], list[Json]]
) -> None:
    args.prompt_data = exam(a=[0, 1], b=[1, 0])
    args.rollout_buffer_settings = {"normaliser": "dr_grpo", "max_staleness": 3, "group_timeout_seconds": 0.5}
    generate(args, 0)
    (run,) = started()
    assert (run["task_type"], run["input_file"], run["origin"]) == ("exam", args.prompt_data, "native")
    told = {name: run["settings"][name] for name in ("group_size", "normaliser", "max_staleness")}
    assert told == {"group_size": 2, "normaliser": "dr_grpo", "max_staleness": 3}
    slime.close()
    with pytest.raises(RunEnded):
        generate(args, 1)
    assert len(started()) == 1


def test_a_start_that_is_refused_says_why(args: Any, started: Callable[[], list[Json]]) -> None:
    args.rollout_task_type = "no_such_task"
    with pytest.raises(StartRefused, match="no_such_task"):
        generate(args, 0)
    assert started() == []


def test_a_run_that_came_to_nothing_is_started_anew(
    slime_server: ServerProcess, args: Any, exam: Callable[..., str], started: Callable[[], list[Json]]
) -> None:
    slime_server.start_run("exam", 2, name=args.rollout_buffer_name, input_file=exam()).stop()
    args.prompt_data = exam(a=[0, 1], b=[1, 0])
    generate(args, 0)
    assert len(started()) == 2


def test_where_the_data_is_gone_a_training_from_nothing_gets_another_run_and_a_model_an_error(
    make_server: MakeServer, slime_server: ServerProcess, args: Any, exam: Callable[..., str]
) -> None:
    server = make_server(generators=slime_server.generators, segment_bytes=1 << 16)
    args.rollout_buffer_url = server.url
    args.prompt_data = exam("x" * 40_000, **{name: [0, 1] for name in "abcdefgh"})
    args.rollout_buffer_settings = {"keep_checkpoints": 1}
    for rollout_id in range(4):
        generate(args, rollout_id)
    poll_until(lambda: server.client.post("/v1/gc").json()["num_segments"] < 6)
    slime.close()
    with pytest.raises(BodiesGone):
        generate(args, 1)
    assert instances(generate(args, 0)) == ["a", "b"]
    runs = server.client.get("/v1/runs").json()["runs"]
    assert [run["checkpoints"] for run in runs] == [[0, 1, 2, 3], [0]]


def test_trainings_are_told_apart_by_where_they_save(slime_server: ServerProcess) -> None:
    names = {run_name(slime_stand_in.arguments(slime_server.url, save=save)) for save in ("/a", "/b", None)}
    assert len(names) == 3
    assert start_fields(slime_stand_in.arguments("", save_interval=20))["keep_checkpoints"] == 42
    with pytest.raises(InvalidInput, match="rollout_buffer_settings"):
        start_fields(slime_stand_in.arguments("", rollout_buffer_settings="max_staleness=3"))


PAGE = (Path(__file__).parents[2] / "docs" / "slime.md").read_text(encoding="utf-8")


def test_the_page_shows_a_configuration_that_works(slime_server: ServerProcess) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    args = slime_stand_in.arguments(slime_server.url, **import_module("yaml").safe_load(block))
    fields = start_fields(args)
    assert (run_name(args), fields["name"]) == ("my-agent-2", "my-agent-2")
    assert fields["max_buffer_size"] == 4096
    assert fields["remote_engine_url"] == "http://10.0.0.5:30000"


def test_the_page_names_the_arguments_that_are_read() -> None:
    source = "".join(path.read_text() for path in Path(slime.__file__).parent.glob("slime*.py"))
    (table,) = re.findall(r"^\| argument of slime .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    names = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:] if line))
    assert len(names) > 10
    assert [name for name in names if name not in source] == []


# --- evaluation


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
