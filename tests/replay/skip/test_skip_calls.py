"""Decorated functions: which calls are skipped, and what is refused."""

import asyncio
import inspect
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.replay.skip import SkipManager
from tests.replay.skip.skip_kit import Prompts, Rollouts, config, folder, run_python


def test_a_second_run_calls_nothing_of_what_is_listed(tmp_path: Path) -> None:
    first, second = Rollouts(), Rollouts()
    for rollouts in (first, second):
        SkipManager.init(config(tmp_path))
        results = [rollouts.at(step) for step in (1, 2, 3)]
        assert [each["call"] for each in results] == [1, 2, 3]
    assert (len(first.calls), len(second.calls)) == (3, 0)
    files = {str(path.relative_to(folder(tmp_path))) for path in folder(tmp_path).rglob("*") if path.is_file()}
    assert {name for name in files if ".lock" not in name} == {
        f"{step}/{name}" for step in (1, 2, 3) for name in ("gen_batch.json", "meta.json")
    }


def test_of_a_partial_cache_only_what_is_missing_is_made_again(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    for step in (1, 2, 3):
        rollouts.at(step)
    shutil.rmtree(folder(tmp_path) / "2")
    assert [rollouts.at(step)["call"] for step in (1, 2, 3)] == [1, 4, 3]
    assert rollouts.at(2)["call"] == 4


def test_each_load_is_a_value_of_its_own(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    made = rollouts.at(1, ["p"])
    loaded = rollouts.at(1, ["p"])
    loaded["prompts"].append("mine")
    assert rollouts.at(1, ["p"]) == made == {"call": 1, "prompts": ["p"]}


@pytest.mark.parametrize("fields", [{"enable": False}, {"steps": []}, {"steps": [7]}])
def test_disabled_or_unlisted_nothing_is_read_or_written(fields: dict[str, Any], tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path / "dumps", **fields))
    rollouts = Rollouts()
    assert [rollouts.at(1)["call"] for _ in range(2)] == [1, 2]
    assert not (tmp_path / "dumps").exists()


def test_before_init_and_before_a_step_the_function_runs(tmp_path: Path) -> None:
    rollouts = Rollouts()
    rollouts.at(1)
    SkipManager.init(config(tmp_path / "dumps"))
    assert SkipManager.step == -1
    rollouts.generate("p")
    assert len(rollouts.calls) == 2
    assert not (tmp_path / "dumps").exists()


def test_another_init_begins_anew(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    SkipManager.set_step(2)
    SkipManager.init(config(tmp_path, "async_rollout"))
    assert (SkipManager.step, list(SkipManager.skip_instances)) == (-1, ["async_rollout"])


@pytest.mark.parametrize("prompts", [Prompts(validate=True), {"meta_info": {"validate": True}}])
@pytest.mark.parametrize("by_name", [False, True])
def test_validation_is_never_skipped(prompts: Any, by_name: bool, tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path / "dumps"))
    SkipManager.set_step(1)
    calls: list[Any] = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: Any) -> str:
        calls.append(prompts)
        return "made"

    for _ in range(2):
        generate(prompts=prompts) if by_name else generate(prompts)
    assert len(calls) == 2
    assert not (tmp_path / "dumps").exists()
    for _ in range(2):
        generate(Prompts(validate=False))
    assert len(calls) == 3


def test_repeat_takes_the_nearest_dump_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    SkipManager.init(config(tmp_path, steps=[5, 20]))
    rollouts = Rollouts()
    assert [rollouts.at(step)["call"] for step in (5, 20)] == [1, 2]
    SkipManager.init(config(tmp_path, steps=list(range(30)), action="repeat"))
    assert [rollouts.at(step)["call"] for step in (5, 12, 3, 20, 25)] == [1, 1, 1, 2, 2]
    assert "step 12: skipped, with the dump of step 5" in caplog.text
    assert "step 3: skipped, with the dump of step 5" in caplog.text
    assert not (folder(tmp_path) / "12").exists()


def test_repeat_without_any_dump_runs_and_dumps(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, action="repeat"))
    rollouts = Rollouts()
    assert [rollouts.at(step)["call"] for step in (2, 1, 3)] == [1, 1, 1]
    assert SkipManager.skip_instances["rollout"].meet_precondition(9, rollouts.generate)


def test_repeat_sees_at_once_what_others_have_dumped(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path / "other"))
    Rollouts().at(1)
    SkipManager.init(config(tmp_path / "own", action="repeat"))
    skip = SkipManager.skip_instances["rollout"]
    assert not skip.meet_precondition(3, print)
    with pytest.raises(RuntimeError, match="no dump for step 3"):
        skip.warp_function(3, print)
    folder(tmp_path / "own").parent.mkdir(parents=True)
    shutil.copytree(folder(tmp_path / "other"), folder(tmp_path / "own"))
    assert skip.meet_precondition(3, print)
    assert skip.warp_function(3, print)["call"] == 1
    shutil.copytree(folder(tmp_path / "other") / "1", folder(tmp_path / "own") / "2")
    assert skip.warp_function(3, print)["call"] == 1  # 2 says that it is of step 1, and is not taken


def test_cache_without_a_dump_is_a_runtime_error_where_it_is_asked_past_the_decorator(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    with pytest.raises(RuntimeError, match="no dump for step 1"):
        SkipManager.skip_instances["rollout"].warp_function(1, print)


def test_generator_functions_are_refused_at_decoration() -> None:
    def stream() -> Iterator[int]:
        yield 1

    async def async_stream() -> AsyncIterator[int]:
        yield 1

    for function in (stream, async_stream):
        with pytest.raises(InvalidInput, match="is a generator"):
            SkipManager.annotate(role="rollout")(function)
    for nothing in (3, dict):
        with pytest.raises(InvalidInput, match="not a function"):
            SkipManager.annotate(role="rollout")(nothing)  # type: ignore[type-var]


def test_unknown_options_and_roles_are_refused_at_decoration() -> None:
    with pytest.raises(TypeError):
        SkipManager.annotate(role="rollout", phase="submit")  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="rolout"):
        SkipManager.annotate(role="rolout")


def test_functions_stay_what_they_were() -> None:
    @SkipManager.annotate(role="rollout")
    def work(number: int) -> int:
        """Works."""
        return number

    @SkipManager.annotate(role="rollout")
    async def later(number: int) -> int:
        """Later."""
        return number

    assert (work.__name__, work.__doc__, inspect.iscoroutinefunction(work)) == ("work", "Works.", False)
    assert (later.__name__, later.__doc__, inspect.iscoroutinefunction(later)) == ("later", "Later.", True)
    assert str(inspect.signature(work)) == "(number: int) -> int"
    assert (Rollouts.generate.__name__, Rollouts.generate.__doc__) == ("generate", "Generates.")


def test_methods_of_every_kind_are_skipped(tmp_path: Path) -> None:
    calls: list[str] = []

    class Trainer:
        @SkipManager.annotate(role="rollout")
        @staticmethod
        def static(prompts: str) -> str:
            calls.append(prompts)
            return prompts

        @SkipManager.annotate(role="rollout")
        @classmethod
        def of_class(cls, prompts: str) -> str:
            calls.append(cls.__name__)
            return prompts

    SkipManager.init(config(tmp_path))
    SkipManager.set_step(1)
    assert [Trainer.static("a"), Trainer().static("a")] == ["a", "a"]
    SkipManager.set_step(2)
    assert [Trainer.of_class("b"), Trainer().of_class("b")] == ["b", "b"]
    assert calls == ["a", "Trainer"]


def test_the_step_is_one_for_the_whole_process() -> None:
    thread = threading.Thread(target=SkipManager.set_step, args=(41,))
    thread.start()
    thread.join()
    assert SkipManager.step == 41


@pytest.mark.parametrize("step", [True, "1", 1.0, None])
def test_what_is_no_step_is_refused(step: Any) -> None:
    SkipManager.set_step(5)
    with pytest.raises(InvalidInput) as caught:
        SkipManager.set_step(step)
    assert (caught.value.field, SkipManager.step) == ("step", 5)


def test_an_exception_of_the_function_is_the_callers_and_nothing_is_dumped(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    SkipManager.set_step(1)
    outcomes: list[BaseException | str] = [ValueError("no engine"), KeyboardInterrupt(), "made"]

    @SkipManager.annotate(role="rollout")
    def generate() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="no engine"):
        generate()
    with pytest.raises(KeyboardInterrupt):
        generate()
    assert [path.name for path in folder(tmp_path).iterdir()] == [".1.lock"]
    assert [generate(), generate()] == ["made", "made"]


def test_a_function_that_calls_another_of_its_role_is_what_is_dumped(tmp_path: Path) -> None:
    class Base:
        @SkipManager.annotate(role="rollout")
        def generate(self, prompts: str) -> str:
            return f"inner {prompts}"

    class Derived(Base):
        @SkipManager.annotate(role="rollout")
        def generate(self, prompts: str) -> str:
            return f"outer {super().generate(prompts)}"

    for action in ("cache", "repeat"):
        SkipManager.init(config(tmp_path / action, action=action))
        SkipManager.set_step(1)
        assert [Derived().generate("p") for _ in range(2)] == ["outer inner p"] * 2


def test_a_function_may_have_arguments_of_any_name(tmp_path: Path) -> None:
    calls: list[Any] = []

    @SkipManager.annotate(role="rollout")
    def generate(**named: Any) -> list[str]:
        calls.append(named)
        return sorted(named)

    @SkipManager.annotate(role="rollout")
    async def generate_later(**named: Any) -> list[str]:
        return generate(**named)

    SkipManager.init(config(tmp_path))
    names = ["args", "cls", "func", "function", "kwargs", "method", "result", "role", "self", "skip", "step"]
    for step in (1, 2):
        SkipManager.set_step(step)
        for _ in range(2):
            named = dict.fromkeys(names, step)
            assert (generate(**named) if step == 1 else asyncio.run(generate_later(**named))) == names
    assert len(calls) == 2


def test_threads_that_miss_one_step_run_it_once(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    SkipManager.set_step(1)
    is_running, go_on = threading.Event(), threading.Event()
    calls: list[int] = []
    results: list[str] = []

    @SkipManager.annotate(role="rollout")
    def generate() -> str:
        calls.append(1)
        is_running.set()
        assert go_on.wait(20)
        return "made"

    threads = [threading.Thread(target=lambda: results.append(generate())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert is_running.wait(20)
    go_on.set()
    for thread in threads:
        thread.join()
    assert (len(calls), results) == (1, ["made"] * 8)


def test_the_package_needs_neither_torch_nor_a_server(tmp_path: Path) -> None:
    code = """
import builtins, sys
HEAVY = {"torch", "numpy", "fastapi", "starlette", "uvicorn", "httpx", "openai", "pydantic", "safetensors", "zstandard"}
real = builtins.__import__
def importing(name, *rest, **more):
    if name.partition(".")[0] in HEAVY:
        raise ImportError(name)
    return real(name, *rest, **more)
builtins.__import__ = importing
from forebay.replay.skip import SkipManager
SkipManager.init({"skip": {"rollout": {"enable": True, "dump_dir": sys.argv[1], "steps": [1]}}})
SkipManager.set_step(1)
calls = []
@SkipManager.annotate(role="rollout")
def generate(prompts):
    calls.append(prompts)
    return {"tokens": [1, 2], "text": "x"}
assert generate(["p"]) == generate(["p"]) == {"tokens": [1, 2], "text": "x"}
print(len(calls), sorted(HEAVY & set(sys.modules)))
"""
    assert run_python(code, tmp_path) == "1 []\n"
