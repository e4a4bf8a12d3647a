"""Each start has its copy of the generator before anybody can ask its hooks, and one host that hears of it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, assert_error, make_group, make_sample, poll_until, write_generator

GOOD = [0.0, 1.0, 0.0, 1.0]
HOOKED = """
import pathlib, threading, time
from forebay.hooks import hookimpl
TASK_TYPE = "hooked"
HEARD, GATE = pathlib.Path({heard!r}), pathlib.Path({gate!r})
while not GATE.exists():
    time.sleep(0.02)
@hookimpl
def run_started(run_id):
    with HEARD.open("a") as file:
        file.write(run_id + "\\n")
def normalize_group_data(group):
    return group[0], [item | {{"reward": {reward}}} for item in group[1]]
def run_rollout(data):
    print("up", data["num_repeat_per_sample"], flush=True)
    threading.Event().wait()
"""


class Task:
    """A generator file whose hooks tell which version of it answered, and that is inspected once its gate is open."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.gate, self.heard = folder / "tasks", folder / "gate", folder / "heard"
        self.write(7.0)

    def write(self, reward: float) -> None:
        source = HOOKED.format(heard=str(self.heard), gate=str(self.gate), reward=reward)
        write_generator(self.folder, source, "hooked_generator.py")

    def told(self) -> list[str]:
        return self.heard.read_text().split() if self.heard.exists() else []


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


def server_of(task: Task, make_server: MakeServer, *, is_known: bool = True) -> ServerProcess:
    if is_known:
        task.gate.touch()
    return make_server(generators=task.folder, start_wait_s=60 if is_known else 0.1)


def codes(server: ServerProcess, run: NativeRun) -> list[str]:
    """The starts of a run that have their copy."""
    return sorted(path.parents[1].name for path in (server.data_dir / "runs" / run.run_id).glob("*/code/hooked_*.py"))


def test_hooks_answer_out_of_the_copy_as_soon_as_a_start_has_its_reply(make_server: MakeServer, task: Task) -> None:
    server = server_of(task, make_server)
    run = server.start_slime(task_type="hooked")
    assert codes(server, run) == ["start-1"]
    run.write(*make_group("seen", GOOD), *make_group("kept", GOOD))
    assert [row["reward"] for row in run.fetch(batch_size=4)["data"]["data"]] == [7.0] * 4
    task.write(8.0)
    again = server.start_slime(task_type="hooked", skip_instance_ids=["seen"])
    assert again.run_id == run.run_id
    assert codes(server, run) == ["start-1", "start-2"]
    rows = again.fetch()["data"]["data"]
    assert [(row["instance_id"], row["reward"]) for row in rows] == [("kept", 8.0)] * 4
    assert again.groups(state="discarded") == []
    run.wait_for_state("running")
    poll_until(task.told)
    assert server.stop() == 0
    assert task.told() == [run.run_id], "the start, once; not the attachment"


def test_a_slow_generator_hears_of_its_run_once_it_is_known(make_server: MakeServer, task: Task) -> None:
    server = server_of(task, make_server, is_known=False)
    run = server.start_slime(task_type="hooked")
    assert codes(server, run) == []
    task.gate.touch()
    run.wait_for_state("running")
    run.write(*make_group("a", GOOD))
    assert [row["reward"] for row in run.fetch()["data"]["data"]] == [7.0] * 4
    poll_until(task.told)
    assert task.told() == [run.run_id]


def spoil(task: Task) -> None:
    """Put something beside the generator that cannot be copied."""
    (task.folder / "assets").mkdir()
    os.mkfifo(task.folder / "assets" / "pipe")


def test_a_start_whose_code_cannot_be_copied_is_refused_and_the_earlier_run_goes_on(
    make_server: MakeServer, task: Task
) -> None:
    server = server_of(task, make_server)
    run = server.start_slime("kept", "hooked")
    run.wait_for_state("running")
    spoil(task)
    body = {"task_type": "hooked", "group_size": 4}
    for path, more in (("/s/kept/start_rollout", {"num_epoch": 2}), ("/v1/runs", {"run_id": run.run_id})):
        error = assert_error(server.client.post(path, json=body | more), 400, "start_refused")
        assert "cannot be copied" in error["message"]
        assert "pipe" in error["message"]
    assert run.view()["state"] == "running"
    assert [each["run_id"] for each in server.client.get("/v1/runs").json()["runs"]] == [run.run_id]
    assert os.listdir(server.data_dir / "runs") == [run.run_id]
    (task.folder / "assets" / "pipe").unlink()
    assert server.client.post("/v1/runs", json=body | {"run_id": run.run_id}).status_code == 201
    assert codes(server, run) == ["start-1", "start-2"]


def test_a_slow_generator_that_cannot_be_copied_fails_its_run(make_server: MakeServer, task: Task) -> None:
    server = server_of(task, make_server, is_known=False)
    run = server.start_slime(task_type="hooked")
    spoil(task)
    task.gate.touch()
    assert "cannot be copied" in run.wait_for_state("failed")["reason"]


def test_a_run_that_is_stopped_while_its_generator_is_inspected_never_starts(
    make_server: MakeServer, task: Task
) -> None:
    server = server_of(task, make_server, is_known=False)
    run = server.start_slime(task_type="hooked")
    assert run.stop()["state"] == "stopped"
    other = server.start_run("hooked")
    task.gate.touch()
    other.wait_for_state("running")
    assert run.view()["state"] == "stopped"
    assert codes(server, run) == []


def test_only_the_last_of_several_attachments_starts_a_process(make_server: MakeServer, task: Task) -> None:
    server = server_of(task, make_server, is_known=False)
    run = server.start_slime(task_type="hooked")
    for number in range(2):
        assert server.start_run("hooked", run_id=run.run_id, num_epoch=number).run_id == run.run_id
    task.gate.touch()
    run.wait_for_state("running")
    assert codes(server, run) == ["start-1"]
    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(server.start_run, "hooked", run_id=run.run_id, lr=n) for n in range(3)]:
            assert each.result().run_id == run.run_id
    poll_until(lambda: run.view()["state"] == "running" and len(codes(server, run)) == 4)
    poll_until(lambda: server.client.get(f"{run.path}/log").json()["lines"])
    assert "has a process already" not in server.log()
    assert "Traceback" not in server.log()


@pytest.mark.soak
def test_a_validating_attachment_is_taken_up_again_after_a_kill(make_server: MakeServer, task: Task) -> None:
    server = server_of(task, make_server)
    run = server.start_slime(task_type="hooked")
    run.wait_for_state("running")
    run.write(make_sample(instance_id="held"))
    server.settings["FOREBAY_START_WAIT_S"] = "0.1"
    server.kill9()
    server.restart()
    assert run.read(num_groups=1)["batch_id"] is None, "the hooks of the first start were asked: their file is loaded"
    task.gate.unlink()
    task.write(8.0)
    attached = server.start_run("hooked", run_id=run.run_id)
    assert attached.view()["state"] == "validating"
    server.kill9()
    server.restart()
    assert run.view()["state"] == "validating"
    task.gate.touch()
    run.wait_for_state("running")
    assert codes(server, run) == ["start-1", "start-2"]
    run.write(*make_group("new", GOOD))
    assert [row["reward"] for row in run.read(num_groups=1)["data"]] == [8.0] * 4
