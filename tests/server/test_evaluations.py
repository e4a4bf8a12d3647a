"""Evaluations beside a training run: what counts, what a weight update does to them, and what the trainer notices."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from forebay.client import BufferClient, MixedClient
from forebay.core.errors import InvalidInput, RunEnded
from tests.conftest import MakeServer
from tests.evaluation_kit import GENERATOR, NUM_EXAM, Training, training
from tests.kit import TIME_LIMIT_S, ServerProcess, poll_until, write_generator


@pytest.fixture(scope="module")
def exam_server(module_servers: MakeServer) -> ServerProcess:
    return module_servers()


@pytest.fixture
def trainer(exam_server: ServerProcess) -> Iterator[Training]:
    with training(exam_server) as trainer:
        yield trainer


def replace_weights(url: str, version: str) -> None:
    """Other weights from somebody of whom Forebay does not know; calls in flight end, and are continued."""
    body = {"model_path": "/weights", "weight_version": version}
    calls = {"pause_generation": {"mode": "abort"}, "update_weights_from_disk": body, "continue_generation": {}}
    for path, given in calls.items():
        assert httpx.post(f"{url}/{path}", json=given, timeout=TIME_LIMIT_S).is_success


def test_a_checkpoint_starts_an_evaluation_whose_result_is_in_the_run(trainer: Training) -> None:
    trainer.fields["max_tokens"] = 7
    trainer.start({"every": 2}, sampling_params={"max_tokens": 77})
    trainer.step(0)
    assert trainer.evaluations() == []
    trainer.step(1)
    poll_until(trainer.evaluations)
    trainer.script.allow()
    result = trainer.result()
    assert (result.task, result.step, result.state, result.reason) == ("exam", 1, "finished", "")
    assert (result.num_counted, result.num_rollouts, result.num_failed) == (NUM_EXAM, NUM_EXAM, 0)
    assert result.mean is not None
    assert (result.mean["value"], result.mean["low"]) == (0.5, pytest.approx(-0.066, abs=1e-3))
    values = {k: estimate["value"] for k, estimate in result.pass_at.items()}
    assert values == pytest.approx({"1": 0.5, "2": 11 / 18, "4": 2 / 3})
    assert {call.body["max_tokens"] for call in trainer.engine.engine.calls if "exam" in call.prompt} == {7}


def test_an_evaluation_is_a_run_whose_groups_no_trainer_gets(trainer: Training) -> None:
    trainer.start()
    trainer.step(0)
    started = trainer.client.evaluate("exam", 0)
    assert trainer.client.evaluate("exam", 0).run_id == started.run_id, "the same one, asked again"
    trainer.script.allow()
    trainer.result()
    assert trainer.client.evaluate("exam", 0).run_id == started.run_id
    path = f"/v1/runs/{started.run_id}"
    ended = poll_until(lambda: view if (view := trainer.server.client.get(path).json())["has_ended"] else {})
    assert ended["evaluates"]["step"] == 0
    assert ended["discarded"].keys() <= {"evaluated", "invalid"}
    refused = trainer.server.client.post(f"{path}/batches", json={"num_groups": 1})
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == "run_id"
    assert trainer.server.client.get(f"{path}/recording").content


def test_the_batches_of_a_trainer_are_the_same_with_an_evaluation(trainer: Training) -> None:
    trainer.script.is_open = True
    trainer.start(num_process=4)
    without = [group for step in range(4) for group in trainer.step(step)]
    trainer.script.counts.clear()
    trainer.start({"every": 1}, num_process=4)
    beside = trainer.step(0)
    trainer.wait_counted(1)
    beside += [group for step in range(1, 4) for group in trainer.step(step)]
    assert sorted(beside) == sorted(without)
    poll_until(lambda: [each.num_counted for each in trainer.evaluations()] == [NUM_EXAM] * 4)


@contextmanager
def updating(trainer: Training, *, is_own: bool) -> Iterator[BufferClient]:
    """A client that updates the weights of the engine: the trainer's, or that of another run."""
    if is_own:
        yield trainer.client
        return
    with BufferClient(trainer.server.url) as other:
        other.start("digits", 2, trainer.server.directory / "train.jsonl", remote_engine_url=trainer.engine.url)
        yield other


@pytest.mark.parametrize(("is_own", "version"), [(True, 4), (False, 3)])
def test_a_weight_update_ends_an_evaluation_with_what_it_has(trainer: Training, is_own: bool, version: int) -> None:
    trainer.start()
    trainer.client.set_weight_version(3)
    trainer.step(0)
    assert trainer.client.evaluate("exam", 0).weight_version == 3
    trainer.wait_asked()
    trainer.script.allow(5)
    trainer.wait_counted(5)
    with updating(trainer, is_own=is_own) as client:
        client.update_weights(version, "/weights")
    result = trainer.result()
    assert (result.state, result.reason) == ("stopped", "the weights were replaced")
    assert (result.num_counted, result.num_rollouts) == (5, NUM_EXAM)
    trainer.step(1)
    trainer.client.set_weight_version(4)
    assert trainer.client.evaluate("exam", 1).weight_version == 4


@pytest.mark.parametrize("is_own", [True, False])
def test_with_hold_a_weight_update_waits_for_the_evaluation(trainer: Training, is_own: bool) -> None:
    trainer.start({"on_update": "hold", "hold_s": 120})
    trainer.step(0)
    trainer.client.evaluate("exam", 0)
    trainer.wait_asked()
    with updating(trainer, is_own=is_own) as client, ThreadPoolExecutor() as pool:
        update = pool.submit(client.update_weights, 1, "/weights")
        trainer.script.allow(5)
        trainer.wait_counted(5)
        assert trainer.engine.engine.weight_updates == []
        trainer.script.allow()
        update.result()
    assert trainer.result().num_counted == NUM_EXAM


def test_a_trainer_that_left_while_its_update_waited_changes_nothing(trainer: Training) -> None:
    trainer.start({"on_update": "hold", "hold_s": 120})
    trainer.step(0)
    trainer.client.evaluate("exam", 0)
    trainer.wait_asked()
    path, body = f"/v1/runs/{trainer.client.run_id}/weight_version", {"weight_version": 1, "model_path": "/weights"}
    with pytest.raises(httpx.ReadTimeout):
        trainer.server.client.put(path, json=body, timeout=1)
    trainer.script.allow()
    trainer.result()
    trainer.client.update_weights(2, "/weights")
    assert len(trainer.engine.engine.weight_updates) == 1


def test_the_same_version_announced_again_ends_nothing(trainer: Training) -> None:
    trainer.start()
    trainer.client.set_weight_version(3)
    trainer.step(0)
    with ThreadPoolExecutor() as pool:
        started = pool.submit(trainer.client.evaluate, "exam", 0)
        while not started.done():
            trainer.client.set_weight_version(3)
    assert trainer.client.evaluate("exam", 0).run_id == started.result().run_id
    trainer.wait_asked()
    trainer.script.allow()
    assert trainer.result().state == "finished"


def test_after_a_rewind_a_step_is_evaluated_again(trainer: Training) -> None:
    trainer.start({"every": 1})
    trainer.client.set_weight_version(1)
    trainer.script.is_open = True
    for step in (0, 1):
        trainer.step(step)
    before = poll_until(lambda: [each.run_id for each in trainer.evaluations() if each.num_counted == NUM_EXAM][1:])
    trainer.client.rewind(0)
    trainer.client.set_weight_version(1)
    assert [each.step for each in trainer.evaluations()] == [0]
    trainer.step(1)
    again = trainer.client.evaluate("exam", 1)
    assert again.run_id not in before
    assert [each.run_id for each in trainer.evaluations()][1:] == [again.run_id]


def test_hold_has_a_limit(trainer: Training) -> None:
    trainer.start({"on_update": "hold", "hold_s": 0.1})
    trainer.step(0)
    trainer.client.evaluate("exam", 0)
    trainer.wait_asked()
    with trainer.client.paused_engines(weight_version=1):
        assert trainer.result().num_counted == 0


def test_rollouts_of_other_weights_do_not_count(trainer: Training) -> None:
    trainer.script.hangs = True
    trainer.start()
    trainer.client.set_weight_version(3)
    trainer.step(0)
    trainer.client.evaluate("exam", 0)
    trainer.wait_asked(NUM_EXAM)
    trainer.script.allow(4)
    trainer.wait_counted(4)
    replace_weights(trainer.engine.url, "9")
    result = trainer.result()
    assert (result.state, result.num_counted, result.num_other_weights) == ("finished", 4, NUM_EXAM - 4)


def test_an_evaluation_that_crashes_leaves_the_training_alone(make_server: MakeServer) -> None:
    with training(make_server(max_restarts=0)) as trainer:
        trainer.fields["crashes"] = True
        trainer.start({"every": 1})
        trainer.step(0)
        result = trainer.result()
        assert (result.state, result.num_counted, result.mean) == ("failed", 0, None)
        assert "no exam today" in result.reason
        trainer.step(1)
        assert trainer.client.stats().warnings == []


def test_a_mark_that_cannot_be_evaluated_is_a_warning(trainer: Training) -> None:
    trainer.start({"every": 1})
    (trainer.server.directory / "exam.jsonl").unlink()
    trainer.step(0)
    [warning] = poll_until(lambda: trainer.client.stats().warnings)
    assert warning.startswith("step 0 could not be evaluated on 'exam'")
    trainer.step(1)


def test_an_evaluation_survives_a_restart_of_the_server(make_server: MakeServer) -> None:
    with training(make_server()) as trainer:
        trainer.start({"every": 1})
        trainer.step(0)
        trainer.server.kill9()  # perhaps before the evaluation has started
        trainer.server.restart()
        trainer.client.checkpoint(0)
        trainer.client.checkpoint(0)
        trainer.wait_asked()
        trainer.script.allow(4)
        trainer.wait_counted(4)
        assert len(trainer.evaluations()) == 1
        trainer.server.kill9()
        trainer.server.restart()
        trainer.script.allow()
        assert trainer.result().num_counted == NUM_EXAM


@pytest.mark.parametrize(
    ("evaluate", "field"),
    [
        ({"every": 0}, "evaluate.every"),
        ({"tasks": {}}, "evaluate.tasks"),
        ({"tasks": {"exam": {"input_file": "/nowhere.jsonl"}}}, "evaluate.tasks.exam.input_file"),
        ({"tasks": {"exam": {"task_type": "unknown"}}}, "evaluate.tasks.exam.task_type"),
        ({"tasks": {"exam": {"sampling_params": "hot"}}}, "evaluate.tasks.exam.sampling_params"),
        ({"tasks": {"exam": {"run_id": "run-1"}}}, "evaluate"),
        ({"on_update": "wait"}, "evaluate.on_update"),
    ],
)
def test_a_training_with_a_wrong_evaluation_does_not_start(trainer: Training, evaluate: Any, field: str) -> None:
    runs = trainer.client.runs()
    with pytest.raises(InvalidInput) as raised:
        trainer.start(evaluate)
    assert raised.value.field == field
    assert len(trainer.client.runs()) == len(runs)


def test_a_wrong_evaluation_is_found_after_a_slow_inspection(make_server: MakeServer) -> None:
    with training(make_server(start_wait_s=0.1)) as trainer:
        write_generator(trainer.server.generators, f"import time\ntime.sleep(1)\n{GENERATOR}", "digits_generator.py")
        trainer.start({"tasks": {"exam": {"input_file": "/nowhere.jsonl"}}})
        failed = poll_until(lambda: stats if (stats := trainer.client.stats()).state == "failed" else None)
        assert failed.reason.startswith("evaluation task 'exam': input_file '/nowhere.jsonl' cannot be read")


def test_only_known_tasks_and_steps_of_a_living_run_are_evaluated(trainer: Training) -> None:
    trainer.start()
    trainer.step(0)
    for task, step, field in (("exams", 0, "task"), ("exam", 1, "step")):
        with pytest.raises(InvalidInput) as raised:
            trainer.client.evaluate(task, step)
        assert raised.value.field == field
    trainer.client.stop()
    with pytest.raises(RunEnded):
        trainer.client.evaluate("exam", 0)


def test_a_training_is_replayed_without_its_evaluations(trainer: Training) -> None:
    trainer.start({"every": 1})
    trainer.step(0)
    poll_until(trainer.evaluations)
    poll_until(lambda: trainer.client.stats().has_ended)
    trainer.client.start(replay=trainer.client.run_id)
    trainer.step(0)
    assert trainer.client.stats().settings["evaluate"] is None


def test_a_mix_evaluates_the_run_that_has_the_task(trainer: Training) -> None:
    trainer.start()
    trainer.step(0)
    with MixedClient(trainer.server.url, {trainer.client.run_id: 1}) as mix:
        started = mix.evaluate("exam", 0)
        assert [each.run_id for each in mix.stats().evaluations] == [started.run_id]


def test_a_run_that_is_trained_on_to_the_end_is_evaluated_once_more(trainer: Training) -> None:
    trainer.start()
    for step in range(4):
        trainer.step(step)
    poll_until(lambda: trainer.client.stats().has_ended)
    with pytest.raises(RunEnded):
        trainer.client.evaluate("exam", 2)
    trainer.client.evaluate("exam", 3)
    trainer.wait_asked()
    trainer.script.allow()
    assert trainer.result().num_counted == NUM_EXAM
