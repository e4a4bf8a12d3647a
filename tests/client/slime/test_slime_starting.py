"""The first rollout starts a run as slime's arguments say; the page of it tells the truth."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from forebay.client import slime
from forebay.client.slime.args import run_name, start_fields
from forebay.core.errors import BodiesGone, InvalidInput, RunEnded, StartRefused
from tests.client import slime_stand_in
from tests.client.slime.kit import generate, instances
from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess, poll_until


@pytest.fixture
def started(slime_server: ServerProcess, args: Any) -> Callable[[], list[Json]]:
    def runs() -> list[Json]:
        everything: list[Json] = slime_server.client.get("/v1/runs").json()["runs"]
        return [run for run in reversed(everything) if run["name"] == args.rollout_buffer_name]

    return runs


def test_the_first_rollout_starts_a_run_as_the_arguments_say(
    args: Any, exam: Callable[..., str], started: Callable[[], list[Json]]
) -> None:
    args.prompt_data = exam(a=[0, 1], b=[1, 0])
    args.rollout_buffer_settings = {"normaliser": "dr_grpo", "max_staleness": 3, "group_timeout_seconds": 6}
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
    server = make_server(generators=slime_server.generators, segment_bytes=1 << 16, replay_bytes=0)
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
    assert [run["checkpoints"] for run in runs] == [[0], [0, 1, 2, 3]]


def test_trainings_are_told_apart_by_where_they_save(slime_server: ServerProcess) -> None:
    names = {run_name(slime_stand_in.arguments(slime_server.url, save=save)) for save in ("/a", "/b", None)}
    assert len(names) == 3
    assert start_fields(slime_stand_in.arguments("", save_interval=20))["keep_checkpoints"] == 42
    with pytest.raises(InvalidInput, match="rollout_buffer_settings"):
        start_fields(slime_stand_in.arguments("", rollout_buffer_settings="max_staleness=3"))


PAGE = (Path(__file__).parents[3] / "docs" / "slime.md").read_text(encoding="utf-8")


def test_the_page_shows_a_configuration_that_works(slime_server: ServerProcess) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    args = slime_stand_in.arguments(slime_server.url, **import_module("yaml").safe_load(block))
    fields = start_fields(args)
    assert (run_name(args), fields["name"]) == ("my-agent-2", "my-agent-2")
    assert fields["max_buffer_size"] == 4096
    assert fields["remote_engine_url"] == "http://10.0.0.5:30000"


def test_the_page_names_the_arguments_that_are_read() -> None:
    source = "".join(path.read_text() for path in Path(slime.__file__).parent.glob("*.py"))
    (table,) = re.findall(r"^\| argument of slime .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    names = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:] if line))
    assert len(names) > 10
    assert [name for name in names if name not in source] == []
