"""The scheduler of a run as it is given: refused where it cannot work, shown where it does."""

import asyncio
import json
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.scheduler import SETTINGS_OF, Scheduler, parse_scheduler
from forebay.engines.scripted import ScriptedEngine
from forebay.generators.base import BaseGenerator, single_turn
from tests.conftest import MakeServer
from tests.kit import ServerProcess, assert_error
from tests.lent import lend_runs, lent_url

TWO = "http://127.0.0.1:9,http://127.0.0.1:10/v1"


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


def post(server: ServerProcess, task_type: str = "lent", **payload: Any) -> Any:
    body = {"task_type": task_type, "group_size": 2, "input_file": "rows.jsonl", **payload}
    return server.client.post("/v1/runs", json=body)


WRONG = [
    (3, "scheduler", "object"),
    ({"policy": "shortest-first"}, "scheduler.policy", "'shortest-first'"),
    ({"policies": "pull"}, "scheduler.policies", "policies"),
    ({"window": 0}, "scheduler.window", "greater than or equal to 1"),
    ({"affinity": 0.5}, "scheduler.affinity", "greater than or equal to 1"),
    *(
        ({"policy": "probe", name: share}, f"scheduler.{name}", "")
        for name in ("top", "heavy")
        for share in (0, 1, -0.2)
    ),
    ({"policy": "probe", "heavy": 1.5}, "scheduler.heavy", "above 0 and below 1"),
    ({"policy": "probe", "heavy": []}, "scheduler.heavy", "list of their addresses"),
    ({"policy": "probe", "heavy": True}, "scheduler.heavy", "above 0"),
    ({"policy": "probe", "heavy": ["here"]}, "scheduler.heavy", "addresses"),
    ({"policy": "probe", "heavy": ["http://127.0.0.1:11"]}, "scheduler.heavy", "'http://127.0.0.1:11'"),
    ({"policy": "probe", "heavy": TWO.split(",")}, "scheduler.heavy", "every engine"),
    ({"policy": "probe", "cap": "half"}, "scheduler.cap", "cut"),
    ({"policy": "probe", "cap": 0}, "scheduler.cap", "tokens"),
    ({"policy": "probe", "broken": "continue"}, "scheduler.broken", "Extra inputs are not permitted"),
    ({"policy": "probe", "by": "words"}, "scheduler.by", "tokens"),
    ({"top": 0.3}, "scheduler.top", "'pull' does not use top"),
    ({"policy": "static", "affinity": 2}, "scheduler.affinity", "'static' does not use affinity"),
    ({"policy": "longest-first", "options": {"a": 1}}, "scheduler.options", "does not use options"),
]


@pytest.mark.parametrize(("scheduler", "field", "message"), WRONG)
def test_a_wrong_scheduler_is_refused_with_field_and_hint(
    lending: ServerProcess, scheduler: Any, field: str, message: str
) -> None:
    error = assert_error(post(lending, scheduler=scheduler, remote_engine_url=TWO), 422, "invalid_input", field)
    assert message in error["message"]
    assert error["hint"]
    if isinstance(scheduler, dict):
        with pytest.raises(InvalidInput) as refused:
            BaseGenerator(TWO, "http://127.0.0.1:9", scheduler=scheduler)
        assert (refused.value.field, refused.value.message) == (field, error["message"])
        assert refused.value.hint == error["hint"]


def test_the_known_policies_are_listed(lending: ServerProcess) -> None:
    error = assert_error(post(lending, scheduler={"policy": "fastest"}), 422, "invalid_input", "scheduler.policy")
    assert "longest-first, probe, pull, static" in error["hint"]


def test_numbers_may_be_strings_and_addresses_may_have_their_version() -> None:
    given = parse_scheduler({"heavy": "0.5", "top": "0.1", "cap": "512", "window": "7"})
    assert (given.heavy, given.top, given.cap, given.window) == (0.5, 0.1, 512, 7)
    assert parse_scheduler({"heavy": ["http://127.0.0.1:9/v1/"]}).heavy == ["http://127.0.0.1:9"]
    assert parse_scheduler(given.model_dump()) == given


def test_every_setting_is_read_by_some_policy() -> None:
    read = {name for names in SETTINGS_OF.values() for name in names}
    assert read == set(Scheduler.model_fields) - {"policy", "options"}


async def test_a_single_engine_is_too_few_for_probes(lending: ServerProcess) -> None:
    probe = {"policy": "probe"}
    async with ScriptedEngine(str) as engine, ScriptedEngine(str) as other:
        answer = await asyncio.to_thread(post, lending, scheduler=probe, remote_engine_url=engine.url)
        error = assert_error(answer, 422, "invalid_input", "scheduler.policy")
        assert "at least two engines" in error["message"]
        assert "remote_engine_url" in error["hint"]
        answer = await asyncio.to_thread(post, lending, scheduler=probe, remote_engine_url=f"{engine.url},{other.url}")
        assert_error(answer, 400, "input_refused", "input_file")  # what is looked at next


async def test_where_only_the_run_process_can_know_it_the_run_fails_with_the_same_words(
    lending: ServerProcess, tmp_path: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q"}\n')
    run = await asyncio.to_thread(lending.start_run, "lent", 2, input_file=str(rows))
    url = await asyncio.to_thread(lent_url, lending, run.run_id)
    async with ScriptedEngine(str) as engine:
        generator = BaseGenerator(engine.url, url, scheduler={"policy": "probe"})
        with pytest.raises(InvalidInput) as refused:
            await generator.run_async(rows, single_turn, len)
    assert "at least two engines" in refused.value.message
    assert (refused.value.field, engine.calls) == ("scheduler.policy", [])
    await asyncio.to_thread(run.stop)


def test_a_scheduler_is_refused_for_a_generator_that_would_ignore_it(lending: ServerProcess) -> None:
    answer = post(lending, "idle", scheduler={"policy": "pull"}, input_file=None)
    error = assert_error(answer, 422, "invalid_input", "scheduler")
    assert "idle_generator.py" in error["message"]
    assert "BaseGenerator" in error["hint"]


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        ({}, {"policy": "pull", "window": 64, "affinity": 1.25}),
        (
            {"scheduler": {"policy": "static"}, "oversampling": {"groups_per_step": 5}},
            {"policy": "static", "window": 5},
        ),
        (
            {"scheduler": {"policy": "longest-first", "window": 9, "affinity": 2}},
            {"policy": "longest-first", "window": 9, "affinity": 2.0},
        ),
    ],
)
def test_a_run_shows_its_policy_with_what_that_reads(
    lending: ServerProcess, tmp_path: Any, payload: Any, shown: Any
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q"}\n')
    run = lending.start_run("lent", group_size=2, input_file=str(tmp_path / "rows.jsonl"), **payload)
    assert run.view()["scheduler"] == shown
    run.stop()


def test_a_run_that_schedules_itself_shows_no_policy(lending: ServerProcess) -> None:
    run = lending.start_run("idle")
    assert run.view()["scheduler"] is None
    run.stop()


def test_a_policy_may_be_a_default_of_the_server(make_server: MakeServer, tmp_path: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q"}\n')
    server = make_server(run_defaults=json.dumps({"lent": {"scheduler": {"policy": "longest-first", "window": 3}}}))
    lend_runs(server)
    run = server.start_run("lent", group_size=2, input_file=str(tmp_path / "rows.jsonl"))
    assert run.view()["scheduler"] == {"policy": "longest-first", "window": 3, "affinity": 1.25}
    assert run.view()["run_defaults"] == {"scheduler": {"policy": "longest-first", "window": 3}}
    run.stop()
    server.kill9()
    server.restart()
    assert run.view()["scheduler"] == {"policy": "longest-first", "window": 3, "affinity": 1.25}
