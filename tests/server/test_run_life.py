"""The life of a run over HTTP: validating, running, crashed, finished, ended; starts refused and repeated."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess, assert_error, make_group, make_sample, poll_until, write_generator

SLOW_IMPORT = """
import pathlib, time
TASK_TYPE = "slow"
GATE = pathlib.Path({gate!r})
while not GATE.exists():
    time.sleep(0.02)
{then}
def run_rollout(data):
    __import__("threading").Event().wait()
"""
CRASHES = """
TASK_TYPE = "crashes"
def run_rollout(data):
    print("about to fail")
    raise RuntimeError("no engine in sight")
"""
RETURNS = """
TASK_TYPE = "returns"
def run_rollout(data):
    print("done at once")
"""
BODY: Json = {"task_type": "idle", "num_repeat_per_sample": "4"}


@pytest.fixture(scope="module")
def shared(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, CRASHES, "crashes_generator.py")
    write_generator(folder, RETURNS, "returns_generator.py")
    return module_servers(generators=folder, max_restarts=1, start_wait_s=60)


@pytest.fixture(scope="module")
def restartable(module_servers: MakeServer) -> ServerProcess:
    """A server that these tests end, and whose generators they edit."""
    return module_servers(start_wait_s=60)


# --- validation


def slow_server(make_server: MakeServer, tmp_path: Path, then: str = "") -> tuple[ServerProcess, Path]:
    gate = tmp_path / "gate"
    folder = tmp_path / "slow"
    write_generator(folder, SLOW_IMPORT.format(gate=str(gate), then=then), "slow_generator.py")
    return make_server(generators=folder, start_wait_s=0.2), gate


def test_a_run_is_validating_until_its_slow_generator_is_known(make_server: MakeServer, tmp_path: Path) -> None:
    server, gate = slow_server(make_server, tmp_path)
    run = server.start_slime(task_type="slow")
    assert run.view()["state"] == "validating"
    assert run.fetch()["success"] is False
    assert run.send(make_sample()).status_code == 200
    assert server.start_slime(task_type="slow").run_id == run.run_id
    gate.touch()
    run.wait_for_state("running")
    assert len(server.client.get("/v1/runs").json()["runs"]) == 1


def test_a_run_fails_later_when_its_slow_generator_turns_out_broken(make_server: MakeServer, tmp_path: Path) -> None:
    server, gate = slow_server(make_server, tmp_path, "raise ImportError('no CUDA here')")
    run = server.start_slime(task_type="slow")
    gate.touch()
    assert "no CUDA here" in run.wait_for_state("failed")["reason"]
    poll_until(lambda: run.view()["has_ended"])
    answer = server.client.post("/get_rollout_data", json={})
    assert "no CUDA here" in assert_error(answer, 410, "run_ended")["message"]


def test_a_validating_run_survives_a_kill(make_server: MakeServer, tmp_path: Path) -> None:
    server, gate = slow_server(make_server, tmp_path)
    run = server.start_slime(task_type="slow")
    server.kill9()
    server.restart()
    assert run.view()["state"] == "validating"
    gate.touch()
    run.wait_for_state("running")


# --- refusals and repetitions


def test_a_repeated_bad_start_is_held_for_a_second(shared: ServerProcess) -> None:
    shared.client.get("/v1/generators").raise_for_status()  # else the refusal waits for inspections
    first_s = [refusal_s(shared, f"unheard of {number}") for number in range(5)]
    again_s = [refusal_s(shared, "unheard of 0") for _ in range(2)]
    # The fastest of them: the machine has other work too. Nothing was refused before the first one.
    assert min(first_s[1:]) < 1.0 <= min(again_s)


def refusal_s(server: ServerProcess, task_type: str) -> float:
    """How long the refusal of a start takes."""
    began_s = time.monotonic()
    answer = server.client.post("/start_rollout", json=BODY | {"task_type": task_type})
    assert_error(answer, 400, "unknown_task_type", "task_type")
    return time.monotonic() - began_s


def test_a_refused_start_leaves_the_running_one_alone(shared: ServerProcess) -> None:
    run = shared.start_slime("kept")
    run.wait_for_state("running")
    for wrong in ({"task_type": "unheard of"}, {"num_repeat_per_sample": 0}, {"input_file": "/no/such/file"}):
        assert shared.client.post("/s/kept/start_rollout", json=BODY | wrong).status_code in (400, 422)
    assert run.view()["state"] == "running"
    run.stop()


def test_an_equal_start_returns_the_same_run_until_it_has_delivered(shared: ServerProcess) -> None:
    run = shared.start_slime("equal")
    assert shared.start_slime("equal").run_id == run.run_id
    run.write(*make_group("g", [0.0, 1.0, 0.0, 1.0]))
    assert shared.start_slime("equal").run_id == run.run_id
    assert run.fetch()["success"] is True
    other = shared.start_slime("equal")
    assert other.run_id != run.run_id
    run.wait_for_state("stopped")
    other.stop()


@pytest.mark.parametrize("change", ["generator", "input", "stopped"])
def test_an_equal_start_is_another_run_once_something_changed(
    restartable: ServerProcess, tmp_path: Path, change: str
) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text("{}\n")
    server = restartable
    first = server.start_slime(change, input_file=str(rows))
    assert server.start_slime(change, input_file=str(rows)).run_id == first.run_id
    if change == "generator":
        path = server.generators / "idle_generator.py"
        path.write_text(path.read_text() + "# edited\n")
    elif change == "input":
        rows.write_text("{}\n{}\n")
    else:
        first.stop()
    second = server.start_slime(change, input_file=str(rows))
    assert second.run_id != first.run_id
    first.wait_for_state("stopped")


def test_a_resume_never_takes_over_a_run_that_was_started_natively(shared: ServerProcess) -> None:
    native = shared.start_run()
    native.write(*make_group("seen", [0.0, 1.0, 0.0, 1.0]))
    native.read(num_groups=1)
    resumed = shared.start_slime("resumes", skip_instance_ids=["seen"])
    assert resumed.run_id != native.run_id
    assert resumed.fetch()["success"] is False
    assert native.view()["state"] in ("validating", "running")
    for run in (native, resumed):
        run.stop()


def test_a_resume_under_another_name_finds_the_run_that_knows_its_list(shared: ServerProcess) -> None:
    first = shared.start_slime("old-name", num_epoch="9")
    first.write(*make_group("seen", [0.0, 1.0, 0.0, 1.0]), *make_group("kept", [0.0, 1.0, 0.0, 1.0]))
    assert first.fetch(batch_size=4)["data"]["meta_info"]["finished_groups"] == ["seen"]
    resumed = shared.start_slime("new-name", num_epoch="9", skip_instance_ids=["seen"])
    assert resumed.run_id == first.run_id
    assert [row["instance_id"] for row in resumed.fetch()["data"]["data"]] == ["kept"] * 4
    resumed.stop()


def test_an_explicit_run_id_decides(shared: ServerProcess) -> None:
    first = shared.start_slime("explicit")
    first.write(*make_group("held", [0.0, 1.0, 0.0, 1.0]))
    assert shared.start_slime("explicit", num_epoch="2").run_id != first.run_id
    again = shared.start_slime("explicit", run_id=first.run_id)
    assert again.run_id == first.run_id
    assert again.fetch()["success"] is True
    unlike = BODY | {"run_id": first.run_id, "num_repeat_per_sample": 5}
    assert_error(shared.client.post("/s/explicit/start_rollout", json=unlike), 422, "invalid_input", "run_id")
    unknown = BODY | {"run_id": "run-none"}
    assert_error(shared.client.post("/s/explicit/start_rollout", json=unknown), 404, "run_not_found")
    again.stop()


def test_no_slime_start_goes_on_with_a_run_that_was_started_natively(shared: ServerProcess) -> None:
    """Its reads would not find it under the stream's name."""
    native = shared.start_run(name="native-named")
    body = BODY | {"run_id": native.run_id}
    error = assert_error(shared.client.post("/s/named/start_rollout", json=body), 422, "invalid_input", "run_id")
    assert "POST /v1/runs" in error["hint"]
    assert native.view()["name"] == "native-named"
    assert native.view()["settings"]["reward_range"] is None
    again = shared.start_run(run_id=native.run_id)
    assert again.run_id == native.run_id
    again.stop()


def test_a_native_start_that_goes_on_with_a_stream_s_run_leaves_other_streams_alone(make_server: MakeServer) -> None:
    server = make_server()
    unnamed, named = server.start_slime(), server.start_slime("named")
    unnamed.write(*make_group("unnamed", [0.0, 1.0, 0.0, 1.0]))
    named.write(*make_group("named", [0.0, 1.0, 0.0, 1.0]))
    assert server.start_run(run_id=named.run_id).run_id == named.run_id
    assert named.view()["name"] == "named"
    assert [row["instance_id"] for row in unnamed.fetch()["data"]["data"]] == ["unnamed"] * 4
    assert [row["instance_id"] for row in named.fetch()["data"]["data"]] == ["named"] * 4


def test_a_native_start_with_the_id_of_a_stream_s_run_for_a_name_is_a_run_of_its_own(shared: ServerProcess) -> None:
    stream = shared.start_slime("watched")
    native = shared.start_run(name=stream.run_id)
    assert native.run_id != stream.run_id
    for run in (stream, native):
        run.stop()


def test_the_data_of_an_earlier_run_stays_readable_by_its_id(shared: ServerProcess) -> None:
    first = shared.start_slime("earlier")
    first.write(*make_group("old", [0.0, 1.0, 0.0, 1.0]))
    second = shared.start_slime("earlier", num_epoch="2")
    second.write(*make_group("new", [0.0, 1.0, 0.0, 1.0]))
    assert [row["instance_id"] for row in second.fetch()["data"]["data"]] == ["new"] * 4
    assert [row["instance_id"] for row in first.read(num_groups=1)["data"]] == ["old"] * 4
    second.stop()


# --- crashes


def test_a_run_that_keeps_crashing_is_failed_with_traceback_and_log(shared: ServerProcess) -> None:
    run = shared.start_slime("crash", "crashes")
    view = run.wait_for_state("failed")
    assert view["reason"].startswith("RuntimeError: no engine in sight\n")
    assert "Traceback" in view["reason"]
    assert "in run_rollout" in view["reason"]
    assert "about to fail" in view["reason"]
    lines = shared.client.get(f"{run.path}/log").json()["lines"]
    assert sum("about to fail" in line for line in lines) == 2
    poll_until(lambda: run.view()["has_ended"])
    answer = shared.client.post("/s/crash/get_rollout_data", json={})
    error = assert_error(answer, 410, "run_ended")
    assert "RuntimeError: no engine in sight" in error["message"]
    assert "Traceback" not in error["message"]


def test_what_a_failed_run_still_holds_is_delivered_before_its_410(shared: ServerProcess) -> None:
    run = shared.start_slime("holds", "crashes", group_timeout_seconds=2, min_timeout_group_size_ratio=0.5)
    run.write(*make_group("whole", [0.0, 1.0, 0.0, 1.0]), *make_group("half", [0.0, 1.0]))
    run.wait_for_state("failed")
    got: list[Any] = []
    while True:
        answer = shared.client.post("/s/holds/buffer/read", json={"batch_size": 1, "timeout": 20, "wait": True})
        if answer.status_code == 410:
            break
        got += [row["instance_id"] for row in answer.json()["data"]["data"]]
    assert got == ["whole"] * 4 + ["half"] * 4


# --- the end


def test_a_returned_run_takes_samples_for_its_time_out_and_then_ends(shared: ServerProcess) -> None:
    run = shared.start_slime("returned", "returns", group_timeout_seconds=6)
    run.wait_for_state("finished")
    assert run.send(make_sample()).status_code == 200
    assert run.view()["has_ended"] is False
    poll_until(lambda: run.view()["has_ended"])
    answer = shared.client.post("/s/returned/get_rollout_data", json={"batch_size": 1})
    assert_error(answer, 410, "run_ended")
    assert_error(shared.client.post(f"{run.path}/batches", json={"num_groups": 1}), 410, "run_ended")
    assert run.write(make_sample())[0]["outcome"] == "late"


def test_a_waiting_reader_hears_of_the_end(shared: ServerProcess) -> None:
    run = shared.start_slime("told", "returns", group_timeout_seconds=1)
    answer = shared.client.post(f"{run.path}/batches", json={"num_groups": 1, "wait_s": 25})
    assert_error(answer, 410, "run_ended")


def test_a_stopped_run_ends_once_its_groups_are_read(shared: ServerProcess) -> None:
    run = shared.start_slime("stopped")
    run.write(*make_group("g", [0.0, 1.0, 0.0, 1.0]))
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    assert run.fetch()["success"] is True
    assert_error(shared.client.post("/s/stopped/get_rollout_data", json={}), 410, "run_ended")


def test_sigterm_loses_nothing_and_exits_cleanly(restartable: ServerProcess) -> None:
    server = restartable
    run = server.start_slime("sigterm")
    run.wait_for_state("running")
    run.write(*make_group("g", [0.0, 1.0, 0.0, 1.0]))
    assert server.stop() == 0
    assert "everything is stored" in server.log()
    assert "Traceback" not in server.log()
    server.restart()
    run.wait_for_state("running")
    assert run.fetch()["success"] is True


def test_an_ended_run_stays_ended_after_a_restart(restartable: ServerProcess) -> None:
    server = restartable
    run = server.start_slime("ended")
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    server.kill9()
    server.restart()
    assert run.view()["state"] == "stopped"
    assert_error(server.client.post("/s/ended/get_rollout_data", json={}), 410, "run_ended")


def test_a_start_repeated_under_its_id_is_the_same_run(server: ServerProcess) -> None:
    body = {"task_type": "idle", "group_size": 4, "start_id": "lost-reply"}
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: server.client.post("/v1/runs", json=body), range(4)))
    assert [reply.status_code for reply in replies] == [201] * 4
    assert len({reply.json()["run_id"] for reply in replies}) == 1
    other = server.client.post("/v1/runs", json=body | {"start_id": "another"}).json()
    assert other["run_id"] != replies[0].json()["run_id"]
    assert_error(server.client.post("/v1/runs", json=body | {"start_id": 7}), 422, "invalid_input", "start_id")
