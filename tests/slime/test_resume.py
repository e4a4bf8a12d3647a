"""slime's trainer is killed, restarted, doubled and moved: what is generated again is exactly what its list requires.

After each restart the same is asserted: the ids that the trainer listed and the groups that it then gets are together
every instance as often as there are epochs, and the engine is asked for what the server did not hold, and no more.
"""

import json
import re
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess, SlimeRun, assert_error, poll_until
from tests.slime.conftest import INSTANCES
from tests.slime.engine import CountingEngine
from tests.slime.trainer import Checkpoint, SlimeTrainer

GROUP_SIZE = 4
EPOCHS = 3
STYLES = ["plain", "five_functions", "transforming"]
OPEN_AT_RESTART = {"group_timeout_seconds": 20}
"""A group that is open when a process ends lives until the next one fills it, on a busy machine too."""
Payload = dict[str, Any]
MakePayload = Callable[..., Payload]


@pytest.fixture
def payload(engine: CountingEngine, input_file: Path) -> MakePayload:
    """The body of a start as slime's client makes it; ``changes`` say what differs."""

    def make(**changes: Any) -> Payload:
        body = {
            "num_process": "1",
            "num_epoch": str(EPOCHS),
            "remote_engine_url": engine.url,
            "task_type": "plain",
            "input_file": str(input_file),
            "num_repeat_per_sample": str(GROUP_SIZE),
            "max_tokens": "8192",
            "sampling_params": {"max_tokens": 8192, "temperature": 0.8, "top_p": 0.9},
            "tokenizer_path": "/models/some",
            "group_timeout_seconds": 6,
        }
        return {**body, **changes}

    return make


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tasks: Path) -> ServerProcess:
    """For tests that leave the server alone: each has a stream of its own."""
    return module_servers(generators=tasks, start_wait_s=60)


@pytest.fixture
def stream(server: ServerProcess, request: pytest.FixtureRequest) -> str:
    """The URL of such a stream."""
    return f"{server.url}/s/{re.sub('[^a-z_]', '.', request.node.name)[-64:]}"


def run_of(server: ServerProcess, trainer: SlimeTrainer) -> SlimeRun:
    return SlimeRun(server, trainer.run_id)


def started(server: ServerProcess, stream: str) -> list[str]:
    """The runs that were started on a stream."""
    runs = server.client.get("/v1/runs").json()["runs"]
    return [run["run_id"] for run in reversed(runs) if stream.endswith(f"/s/{run['name']}")]


def wait_for_samples(run: SlimeRun, num: int) -> None:
    """Until the engine's last answer within its budget is stored."""
    poll_until(lambda: sum(group["num_samples"] for group in run.groups()) == num)


def held(run: SlimeRun) -> Counter[Any]:
    """Groups that need no further samples, by instance."""
    return Counter(group["instance_id"] for group in run.groups() if group["num_samples"] == GROUP_SIZE)


def times(num: int) -> Counter[Any]:
    return Counter(dict.fromkeys(INSTANCES, num))


def assert_exact(listed: list[Any], trainer: SlimeTrainer, epochs: int = EPOCHS) -> None:
    """No group is missing and none comes twice, with respect to the list that the trainer sent."""
    assert Counter(listed) + Counter(trainer.delivered) == times(epochs)


def missing_calls(held_groups: Counter[Any], epochs: int = EPOCHS) -> dict[Any, int]:
    """The engine calls for every group that is not held."""
    return {i: num for i in INSTANCES if (num := (epochs - held_groups[i]) * GROUP_SIZE)}


@pytest.mark.parametrize("style", STYLES)
def test_a_trainer_that_is_not_killed_gets_every_group_once_and_hears_of_the_end(
    server: ServerProcess, stream: str, engine: CountingEngine, payload: MakePayload, style: str
) -> None:
    trainer = SlimeTrainer(stream, payload(task_type=style, num_process="2")).start()
    trainer.steps_to_the_end()
    assert_exact([], trainer)
    assert engine.taken() == missing_calls(Counter())
    assert Counter(trainer.checkpoint().listed) <= times(EPOCHS)


def test_killed_before_the_first_checkpoint_everything_is_generated_anew(
    server: ServerProcess, stream: str, engine: CountingEngine, payload: MakePayload
) -> None:
    first = SlimeTrainer(stream, payload()).start()
    first.step()
    wait_for_samples(run_of(server, first), EPOCHS * len(INSTANCES) * GROUP_SIZE)
    engine.taken()
    second = SlimeTrainer(stream, payload()).start()
    assert second.run_id != first.run_id
    second.steps_to_the_end()
    assert_exact([], second)
    assert engine.taken() == missing_calls(Counter())
    assert run_of(server, first).read(num_groups=1)["batch_id"]


@pytest.mark.parametrize("style", ["plain", pytest.param("five_functions", marks=pytest.mark.soak)])
def test_killed_in_the_second_of_three_epochs_only_what_is_missing_is_generated(
    server: ServerProcess, stream: str, payload: MakePayload, style: str
) -> None:
    with CountingEngine(budget=9 * GROUP_SIZE + 2) as engine:
        body = payload(task_type=style, remote_engine_url=engine.url, num_process="3", **OPEN_AT_RESTART)
        first = SlimeTrainer(stream, body).start()
        run = run_of(server, first)
        wait_for_samples(run, 9 * GROUP_SIZE + 2)
        first.step()
        saved = first.checkpoint()
        before = held(run)
        first.delivered.clear()
        first.step()
        assert first.delivered, "the trainer got groups that its checkpoint does not know"
        engine.taken()
        second = SlimeTrainer(stream, body, resumed_from=saved).start()
        engine.allow(None)
        assert second.run_id == first.run_id
        second.steps_to_the_end()
        assert_exact(saved.listed, second)
        assert engine.taken() == missing_calls(before)


def test_a_start_whose_reply_was_lost_starts_one_run(
    server: ServerProcess, stream: str, engine: CountingEngine, payload: MakePayload
) -> None:
    trainer = SlimeTrainer(stream, payload(num_epoch="1"))
    body = json.dumps({**trainer.payload, "remote_buffer_url": stream, "skip_instance_ids": []}).encode()
    path = stream.removeprefix(server.url).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as lost:
        head = b"POST %s/start_rollout HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path, len(body))
        lost.sendall(head + body)
        poll_until(lambda: started(server, stream))
    trainer.start()
    trainer.steps_to_the_end()
    assert started(server, stream) == [trainer.run_id]
    assert_exact([], trainer, epochs=1)
    assert engine.taken() == missing_calls(Counter(), epochs=1)


def test_two_trainers_at_once_under_two_names_do_not_meet(
    server: ServerProcess, stream: str, engine: CountingEngine, payload: MakePayload
) -> None:
    bodies = [payload(task_type=style, num_epoch="2") for style in ("plain", "five_functions")]
    trainers = [SlimeTrainer(f"{stream[:-5]}{name}", b) for name, b in zip(("left", "right"), bodies, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda trainer: trainer.start().steps_to_the_end(), trainers))
    for trainer in trainers:
        assert_exact([], trainer, epochs=2)
    assert trainers[0].run_id != trainers[1].run_id
    assert engine.taken() == dict.fromkeys(INSTANCES, 2 * 2 * GROUP_SIZE)


def test_one_of_two_trainers_restarts_and_the_other_notices_nothing(
    server: ServerProcess, stream: str, payload: MakePayload
) -> None:
    with CountingEngine(budget=0) as engine:
        body = payload(remote_engine_url=engine.url, num_epoch="2", **OPEN_AT_RESTART)
        left, right = (SlimeTrainer(f"{stream[:-5]}{name}", body).start() for name in ("left", "right"))
        engine.allow(2 * 6 * GROUP_SIZE)
        poll_until(lambda: sum(held(run_of(server, left)).values()) >= 3)
        left.step()
        saved = left.checkpoint()
        again = SlimeTrainer(left.url, body, resumed_from=saved).start()
        assert (again.run_id, run_of(server, right).view()["state"]) == (left.run_id, "running")
        engine.allow(None)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(SlimeTrainer.steps_to_the_end, (again, right)))
        assert_exact(saved.listed, again, epochs=2)
        assert_exact([], right, epochs=2)


def test_a_new_engine_after_the_restart_gets_all_further_calls(
    server: ServerProcess, stream: str, input_file: Path, payload: MakePayload
) -> None:
    with CountingEngine(budget=7 * GROUP_SIZE) as old, CountingEngine() as new:
        first = SlimeTrainer(stream, payload(remote_engine_url=old.url)).start()
        run = run_of(server, first)
        wait_for_samples(run, 7 * GROUP_SIZE)
        first.step()
        saved = first.checkpoint()
        old.taken()
        second = SlimeTrainer(stream, payload(remote_engine_url=new.url), resumed_from=saved).start()
        assert second.run_id == first.run_id
        before = held(run)
        old.allow(None)
        second.steps_to_the_end()
        assert_exact(saved.listed, second)
        assert new.taken() == missing_calls(before)
        assert old.taken() == {}


def test_with_the_data_directory_lost_the_list_alone_decides(
    make_server: MakeServer, tasks: Path, engine: CountingEngine, payload: MakePayload
) -> None:
    server = make_server(generators=tasks, start_wait_s=60)
    first = SlimeTrainer(server.url, payload()).start()
    first.step()
    first.step()
    saved = first.checkpoint()
    server.kill9()
    server.data_dir = server.directory / "another"
    server.restart()
    engine.taken()
    second = SlimeTrainer(server.url, payload(), resumed_from=saved).start()
    assert second.run_id != first.run_id
    second.steps_to_the_end()
    assert_exact(saved.listed, second)
    assert engine.taken() == missing_calls(Counter(saved.listed))


@pytest.mark.soak
def test_after_the_loss_a_second_restart_is_exact_as_well(
    make_server: MakeServer, tasks: Path, engine: CountingEngine, payload: MakePayload
) -> None:
    server = make_server(generators=tasks, start_wait_s=60)
    first = SlimeTrainer(server.url, payload()).start()
    first.step()
    server.kill9()
    server.data_dir = server.directory / "another"
    server.restart()
    second = SlimeTrainer(server.url, payload(), resumed_from=first.checkpoint()).start()
    second.step()
    saved = second.checkpoint()
    second.step()
    third = SlimeTrainer(server.url, payload(), resumed_from=saved).start()
    assert third.run_id == second.run_id
    third.steps_to_the_end()
    assert_exact(saved.listed, third)


@pytest.mark.parametrize("style", ["plain", pytest.param("transforming", marks=pytest.mark.soak)])
def test_the_server_is_killed_in_the_middle_and_the_trainer_polls_on(
    make_server: MakeServer, tasks: Path, payload: MakePayload, style: str
) -> None:
    server = make_server(generators=tasks, start_wait_s=60)
    with CountingEngine(budget=7 * GROUP_SIZE + 1) as engine:
        body = payload(task_type=style, remote_engine_url=engine.url, **OPEN_AT_RESTART)
        trainer = SlimeTrainer(server.url, body).start()
        run = run_of(server, trainer)
        wait_for_samples(run, 7 * GROUP_SIZE + 1)
        trainer.step()
        before = held(run)
        engine.taken()
        server.kill9()
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(trainer.steps_to_the_end)
            server.restart()
            engine.allow(None)
            training.result(120)
        assert_exact([], trainer)
        assert engine.taken() == missing_calls(before)


@pytest.mark.soak
def test_server_and_trainer_killed_together(make_server: MakeServer, tasks: Path, payload: MakePayload) -> None:
    server = make_server(generators=tasks, start_wait_s=60)
    with CountingEngine(budget=8 * GROUP_SIZE) as engine:
        body = payload(remote_engine_url=engine.url)
        first = SlimeTrainer(server.url, body).start()
        wait_for_samples(run_of(server, first), 8 * GROUP_SIZE)
        first.step()
        saved = first.checkpoint()
        first.step()
        before = held(run_of(server, first))
        server.kill9()
        engine.taken()
        server.restart()
        second = SlimeTrainer(server.url, body, resumed_from=saved).start()
        assert second.run_id == first.run_id
        engine.allow(None)
        second.steps_to_the_end()
        assert_exact(saved.listed, second)
        assert engine.taken() == missing_calls(before)


def test_a_finished_training_that_starts_again_is_told_the_end_at_once(
    server: ServerProcess, stream: str, engine: CountingEngine, payload: MakePayload
) -> None:
    first = SlimeTrainer(stream, payload(num_epoch="1"), groups_per_step=1).start()
    first.steps_to_the_end()
    engine.taken()
    everything = Checkpoint(9, {"0": first.delivered})
    second = SlimeTrainer(stream, payload(num_epoch="1"), resumed_from=everything).start()
    second.steps_to_the_end()
    assert (second.delivered, engine.taken()) == ([], {})
    assert_error(server.client.post(f"{stream}/get_rollout_data", json={}), 410, "run_ended")
