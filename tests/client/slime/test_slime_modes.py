"""slime's rollout function in other set-ups of slime: engines that share its GPUs, options, and slime's fork miles."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.client import slime
from forebay.client.trainer import marked_steps
from forebay.core.errors import InvalidInput
from forebay.engines.scripted import ScriptedEngine, ThreadedEngine
from tests.client import slime_stand_in
from tests.client.slime.kit import generate, group
from tests.kit import NativeRun, ServerProcess, poll_until

NUM_ROWS = 8


@pytest.fixture
def trained(args: Any, tmp_path: Path) -> Any:
    """The arguments of a training on eight prompts, four groups in each of two rollouts."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"instance_id": n, "prompt": f"{n}"}) + "\n" for n in range(NUM_ROWS)))
    args.rollout_task_type, args.prompt_data, args.rollout_buffer_settings = "alternating", str(path), {}
    return args


def use_engine(args: Any, engine: ThreadedEngine) -> None:
    args.rollout_buffer_settings = {"remote_engine_url": engine.url}


def run_of(server: ServerProcess, args: Any) -> NativeRun:
    runs = server.client.get("/v1/runs").json()["runs"]
    return NativeRun(server, next(run["run_id"] for run in runs if run["name"] == args.rollout_buffer_name))


@pytest.mark.parametrize(("is_partial", "leftover"), [(False, "defer"), (True, "keep")])
def test_beside_the_trainer_the_engine_is_idle_between_rollouts(
    slime_server: ServerProcess, trained: Any, is_partial: bool, leftover: str
) -> None:
    trained.colocate, trained.partial_rollout = True, is_partial
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        use_engine(trained, engine)
        for rollout_id in range(NUM_ROWS // 2 - 1):
            assert len(generate(trained, rollout_id)) == 2
            run = run_of(slime_server, trained)
            held = poll_until(lambda run=run: view if (view := run.view())["is_held"] else {})  # type: ignore[misc]
            engine.wait_in_flight(0, timeout_s=20)
            assert (held["weight_version"], held["groups"]["ready"]) == (rollout_id, 0)
            assert held["settings"]["oversampling"]["leftover"] == leftover


def test_beside_the_trainer_what_is_there_after_a_rewind_comes_first(slime_server: ServerProcess, trained: Any) -> None:
    trained.colocate = True
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        use_engine(trained, engine)
        before = [generate(trained, rollout_id) for rollout_id in range(3)]
        slime.close()  # the trainer is started again, with the model of rollout 0
        engine.wait_in_flight(0, timeout_s=20)
        num_calls = len(engine.calls)
        after = [generate(trained, rollout_id) for rollout_id in (1, 2)]
        assert after == before[1:]
        assert (run_of(slime_server, trained).view()["weight_version"], len(engine.calls)) == (0, num_calls)
        assert len(generate(trained, 3)) == 2, "then the engine is asked again"
        assert run_of(slime_server, trained).view()["weight_version"] == 3


def test_on_other_gpus_the_generator_is_at_most_two_rollouts_ahead(slime_server: ServerProcess, trained: Any) -> None:
    trained.rollout_num_process = 2
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        use_engine(trained, engine)
        generate(trained, 0)
        run = run_of(slime_server, trained)
        assert run.view()["settings"]["max_buffer_size"] == 8
        ahead = poll_until(lambda: view if (view := run.view())["samples"]["buffered"] >= 8 else {})
        assert ahead["groups"]["ready"] <= 5, "what was under way when there was no more room still comes"
        slime_samples = [generate(trained, rollout_id) for rollout_id in range(1, NUM_ROWS // 2)]
    assert len({sample.index for groups in slime_samples for group in groups for sample in group}) == 12


def test_unusable_groups_of_a_held_run_are_an_error_and_no_hang(
    slime_server: ServerProcess, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.colocate = True
    monkeypatch.setattr(marked_steps, "WAIT_S", 0.5)
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        use_engine(trained, engine)
        monkeypatch.setattr(slime.samples, "_slots", refuse)
        with pytest.raises(InvalidInput, match=r"the trainer can use none of 2 groups; .*: no slots"):
            generate(trained, 0)


def refuse(*_: object) -> Any:
    raise InvalidInput("no slots")


def test_the_package_that_is_loaded_gets_its_own_classes(
    run: NativeRun, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in slime_stand_in.modules().items():
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name.replace("slime", "miles"), module)
    run.write(*group("a"), *group("b"))
    assert len(generate(args, 0)) == 2
