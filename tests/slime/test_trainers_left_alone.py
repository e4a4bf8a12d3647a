"""What slime's own client cannot do for itself: go on without a list, and notice the end. The server says so."""

from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, ServerProcess, SlimeRun, assert_error, make_group, poll_until
from tests.slime.conftest import INSTANCES
from tests.slime.engine import CountingEngine
from tests.slime.trainer import SlimeTrainer

GROUP_SIZE = 4


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tasks: Path) -> ServerProcess:
    return module_servers(generators=tasks, start_wait_s=60)


def test_groups_of_a_run_killed_before_its_first_checkpoint_are_told_of_and_come_under_its_id(
    server: ServerProcess, engine: CountingEngine, input_file: Path
) -> None:
    url = f"{server.url}/s/early"
    payload = {
        "task_type": "plain",
        "num_process": "1",
        "num_epoch": "1",
        "num_repeat_per_sample": str(GROUP_SIZE),
        "remote_engine_url": engine.url,
        "input_file": str(input_file),
        "group_timeout_seconds": 10,
    }
    first = SlimeTrainer(url, payload).start()
    run = SlimeRun(server, first.run_id, "/s/early")
    poll_until(lambda: sum(group["num_samples"] for group in run.groups()) == len(INSTANCES) * GROUP_SIZE)
    run.fetch(batch_size=2 * GROUP_SIZE)
    engine.taken()

    again = httpx.post(
        f"{url}/start_rollout",
        json={**payload, "remote_buffer_url": url, "skip_instance_ids": []},
        timeout=TIME_LIMIT_S,
    ).json()
    assert again["run_id"] != first.run_id
    for told in (again["note"], server.log()):
        assert f"run {first.run_id} was started alike and still has 4 groups ready, and 2 delivered" in told
        assert f"/s/{first.run_id}" in told
    SlimeRun(server, again["run_id"]).stop()

    engine.taken()
    for _ in range(2):  # killed early once more: the address still means the run
        trainer = SlimeTrainer(f"{server.url}/s/{first.run_id}", payload).start()
        assert trainer.run_id == first.run_id
        trainer.step()
    saved = trainer.checkpoint()
    resumed = SlimeTrainer(trainer.url, payload, resumed_from=saved).start()
    assert resumed.run_id == first.run_id
    resumed.steps_to_the_end()
    assert sorted([*saved.listed, *resumed.delivered]) == INSTANCES
    assert engine.taken() == {}, "nothing was generated again"


def test_a_start_under_the_id_of_a_run_of_another_kind_is_refused(server: ServerProcess) -> None:
    run = server.start_slime("unlike", "plain", group_size=4)
    body = {"task_type": "plain", "num_repeat_per_sample": "5"}
    assert_error(server.client.post(f"/s/{run.run_id}/start_rollout", json=body), 422, "invalid_input", "run_id")
    run.stop()


def test_a_first_start_and_one_after_a_run_without_ready_groups_have_nothing_to_note(server: ServerProcess) -> None:
    body = {"task_type": "plain", "num_repeat_per_sample": "4"}
    for num_epoch in ("1", "2"):
        reply = server.client.post("/s/nothing-left/start_rollout", json={**body, "num_epoch": num_epoch}).json()
        assert set(reply) == {"message", "run_id", "state"}
        SlimeRun(server, reply["run_id"]).write(*make_group("short", [0.0, 1.0]))


def test_a_client_that_polls_an_ended_run_on_and_on_is_told_of_once(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_slime("ended")
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    text = f"run {run.run_id} (stream 'ended') has ended (stopped)"
    assert_error(server.client.post("/s/ended/get_rollout_data", json={}), 410, "run_ended")
    assert text not in server.log(), "a client that takes the word for it is no news"
    for _ in range(5):
        assert_error(server.client.post("/s/ended/get_rollout_data", json={}), 410, "run_ended")
    assert server.log().count(text) == 1
    [line] = [line for line in server.log().splitlines() if text in line]
    assert "polls on" in line
    assert "--fetch-trajectory-retry-times" in line
    assert "forebay.client.slime.generate_rollout" in line
