"""What a run process asks and tells under its private address: plan, progress, counts, and its trainer's step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from forebay.core.ids import group_id, rollout_uid
from forebay.server.cli.command_line import app as cli
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_group, make_sample
from tests.lent import lend_runs, lent_url

GOOD = [0.0, 1.0]


@dataclass
class Process:
    """Stands in for the process of ``run``."""

    run: NativeRun
    url: str

    def ask(self, path: str, **query: Any) -> Json:
        answer = self.run.client.get(f"{self.url}/{path}", params=query)
        assert answer.status_code == 200, answer.text
        told: Json = answer.json()
        return told

    def tell(self, **progress: Any) -> httpx.Response:
        return self.run.client.post(f"{self.url}/progress", json=progress)

    def announce(self, version: int) -> None:
        answer = self.run.client.put(f"{self.run.path}/weight_version", json={"weight_version": version})
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


def start(server: ServerProcess, folder: Any, **payload: Any) -> Process:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "q"}\n')
    run = server.start_run("lent", group_size=2, input_file=str(rows), **payload)
    return Process(run, lent_url(server, run.run_id))


@pytest.fixture
def process(lending: ServerProcess, tmp_path) -> Iterator[Process]:
    process = start(lending, tmp_path, oversampling={"groups_per_step": 2})
    yield process
    process.run.stop()


def test_counts_of_all_processes_are_added_up_and_outlive_a_kill(process: Process) -> None:
    process.tell(process_id="one", counts={"rollouts_finished": 3, "tokens_finished": 30, "tokens_aborted": 4})
    for _ in range(2):  # a report whose answer was lost is sent again
        process.tell(process_id="two", counts={"rollouts_finished": 1, "tokens_finished": 20, "rollouts_aborted": 1})
    server = process.run.server
    server.kill9()
    server.restart()
    view = process.run.view()
    assert view["counts"] == {
        "rollouts_finished": 4,
        "tokens_finished": 50,
        "tokens_aborted": 4,
        "rollouts_aborted": 1,
    }
    assert view["tokens"] == {"kept": 50, "wasted": 4, "mean_finished": 12.5, "mean_aborted": 4.0}
    assert 'forebay_run_counts_total{count="tokens_finished"} 50.0' in process.run.client.get("/metrics").text
    shown = CliRunner().invoke(cli, ["status", process.run.run_id, "--url", server.url]).stdout
    assert "50 kept · 4 wasted · 12.5 per finished rollout · 4.0 per aborted rollout" in shown


@pytest.mark.parametrize("counts", [{"Big": 1}, {"a": -1}, {"a": 1.5}, {"": 1}, {f"n{n}": 1 for n in range(300)}, 7])
def test_counts_that_are_none_are_a_422(process: Process, counts: Any) -> None:
    answer = process.tell(process_id="one", counts=counts)
    assert answer.status_code == 422
    assert answer.json()["error"]["field"].startswith("counts")
    assert process.run.view()["counts"] == {}


def test_an_epoch_that_cannot_be_stored_is_a_422_and_nothing_is_loaded_again(process: Process) -> None:
    answer = process.tell(opened=[["task", 1 << 63]])
    assert answer.status_code == 422
    assert answer.json()["error"]["field"].startswith("opened")
    assert process.tell(opened=[["task", (1 << 63) - 1]]).status_code == 200
    assert "accepts writes again" not in process.run.server.log()


def test_deadlines_stand_still_while_the_run_is_held(lending: ServerProcess, tmp_path) -> None:
    process = start(lending, tmp_path, group_timeout_seconds=0.5)
    process.tell(held=True)
    assert process.run.view()["is_held"]
    assert "forebay_runs_held 1.0" in process.run.client.get("/metrics").text
    process.run.write(*make_group("short", GOOD[:1]))
    assert process.ask("closed_groups", wait_s=1.0)["groups"] == []
    process.tell(held=False)
    [closed] = process.ask("closed_groups", wait_s=10.0)["groups"]
    assert closed["reason"] == "timed_out"
    process.run.stop()


def groups_of(reply: Json) -> Json:
    """The step that a reply tells, without what was announced last: that may have been no new step."""
    return {name: value for name, value in reply["step"].items() if name != "weights"}


def test_a_step_begins_with_another_version_and_counts_its_own_groups(process: Process) -> None:
    first = process.ask("closed_groups", seen=-1, wait_s=10)
    assert groups_of(first) == {"number": 0, "weight_version": None, "counted": [], "discarded": []}
    process.run.write(*make_group("a", GOOD), *make_group("flat", [1.0, 1.0]))
    assert set(process.ask("plan")["step"]["counted"]) == {group_id("a", 0), group_id("flat", 0)}
    process.run.read(num_groups=1)
    told = process.ask("closed_groups", seen=first["seen"], wait_s=10)["step"]
    assert (told["counted"], told["discarded"]) == ([group_id("a", 0)], [group_id("flat", 0)])
    process.run.write(*make_group("b", GOOD))
    process.announce(5)
    begun = process.ask("closed_groups", after=9, seen=told["number"] + 1, wait_s=10)
    assert groups_of(begun) == {"number": 1, "weight_version": 5, "counted": [], "discarded": []}
    process.announce(5)
    assert process.ask("closed_groups", after=9, seen=begun["seen"], wait_s=0.2)["step"]["number"] == 1
    process.run.read(num_groups=1)  # b, which was complete before
    process.run.write(*make_group("c", GOOD))
    assert process.ask("plan")["step"]["counted"] == [group_id("c", 0)]


def test_a_rewind_begins_no_step_since_what_was_made_for_it_is_still_there(process: Process) -> None:
    """Nor does the announcement of what its trainer had then: the run would get ahead of it by a step."""
    for version in (1, 2):
        process.announce(version)
        process.run.write(*make_group(f"of {version}", GOOD))
        process.run.checkpoint(version, process.run.read(num_groups=1))
    before = groups_of(process.ask("plan"))
    assert (before["number"], before["counted"]) == (2, [group_id("of 2", 0)])
    process.run.rewind(1)
    assert process.run.view()["weight_version"] == 1
    assert groups_of(process.ask("plan")) == before
    server = process.run.server
    server.kill9()
    server.restart()
    process.announce(2)
    assert groups_of(process.ask("plan")) == before
    process.announce(1)
    assert groups_of(process.ask("plan")) == {"number": 3, "weight_version": 1, "counted": [], "discarded": []}


def test_the_feed_of_a_stopped_run_answers_at_once(process: Process) -> None:
    seen = process.ask("closed_groups", seen=-1)["seen"]
    process.run.stop()
    told = process.ask("closed_groups", seen=seen, wait_s=25)
    assert told["run_state"] == "stopped"


def test_the_plan_lists_uids_that_do_not_tell_their_slot(process: Process) -> None:
    run_id, group = process.run.run_id, group_id("a", 0)
    for slot, number in ((0, 0), (1, 5)):
        uid = rollout_uid(run_id, group, number)
        instance = "a" if slot else "b"
        process.run.write(make_sample(uid=uid, instance_id=instance, epoch=0, slot=slot))
    taken = {instance_id: (slots, uids) for instance_id, _, slots, uids in process.ask("plan")["taken"]}
    assert taken["a"] == ([1], [rollout_uid(run_id, group, 5)])


@pytest.mark.parametrize(
    ("oversampling", "field"),
    [
        (3, "oversampling"),
        ({}, "oversampling"),
        ({"leftover": "keep"}, "oversampling"),
        ({"rollouts_per_group": 1}, "oversampling.rollouts_per_group"),
        ({"rollouts_per_group": "many"}, "oversampling.rollouts_per_group"),
        ({"groups_per_step": 0}, "oversampling.groups_per_step"),
        ({"groups_per_step": 1, "leftover": "sell"}, "oversampling.leftover"),
        ({"groups_per_step": 1, "group_per_step": 1}, "oversampling.group_per_step"),
        ({"leftover": "defer"}, "oversampling"),
        ({"leftover": "defer", "rollouts_per_group": 2}, "oversampling"),
        ({"leftover": "defer", "groups_per_step": 2, "groups_begun": 1}, "oversampling"),
        ({"groups_per_step": 2, "groups_begun": 4}, "oversampling"),
    ],
)
def test_wrong_oversampling_is_a_422_that_names_the_field(
    lending: ServerProcess, oversampling: Any, field: str
) -> None:
    body = {"task_type": "lent", "group_size": 2, "oversampling": oversampling}
    error = assert_error(lending.client.post("/v1/runs", json=body), 422, "invalid_input", field)
    assert error["hint"]
    assert "Value error" not in error["message"]


def test_oversampling_is_refused_for_a_generator_that_would_ignore_it(lending: ServerProcess) -> None:
    body = {"task_type": "idle", "group_size": 2, "oversampling": {"groups_per_step": 1}}
    error = assert_error(lending.client.post("/v1/runs", json=body), 422, "invalid_input", "oversampling")
    assert "idle_generator.py" in error["message"]
    assert "BaseGenerator" in error["hint"]
