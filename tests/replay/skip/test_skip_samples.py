"""Streams: steps by the ids of samples, many at once, one execution, over processes too, and a loop that goes on."""

import asyncio
import contextvars
import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.replay.skip import BaseSkip, SkipManager, manager, parse_async_rollout_sample_step, register_skip
from tests.replay.skip.skip_kit import Rollouts, Samples, config, folder, run_python

LIMIT_S = 30.0


@pytest.mark.parametrize(
    ("sample_id", "step"), [("sample_0_7", 7), ("uid_sample_0_7", 7), ("sample_12_0", 0), ("sample_3_0128", 128)]
)
def test_the_last_part_of_an_id_is_the_step(sample_id: str, step: int) -> None:
    assert parse_async_rollout_sample_step(sample_id) == step


WRONG = [
    "",
    "7",
    "sample_7",
    "sample_0_7_1",
    "sample_0_x",
    "uid_uid_sample_0_7",
    "sample_0_-1",
    "sample_0_\u0667",
    7,
    None,
]


@pytest.mark.parametrize("sample_id", WRONG)
def test_anything_else_is_no_id(sample_id: Any) -> None:
    with pytest.raises(ValueError, match="sample_<epoch>_<index>") as caught:
        parse_async_rollout_sample_step(sample_id)
    assert isinstance(caught.value, InvalidInput)


def of_verl(uid: str) -> Any:
    return SimpleNamespace(non_tensor_batch={"uid": [uid]})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((None, "prompts", "sample_0_2"), {}),
        ((None, "prompts"), {"sample_id": "sample_0_2"}),
        ((None, of_verl("sample_0_9"), "uid_sample_0_2"), {}),
        ((None, of_verl("uid_sample_0_2")), {}),
        ((None,), {"prompts": of_verl("uid_sample_0_2")}),
        (({"uid": ["uid_sample_0_2"]},), {}),
        (("prompts", "sample_0_2"), {}),
    ],
)
def test_the_step_is_read_from_the_call(args: Any, kwargs: Any, tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, "async_rollout"))
    assert SkipManager.skip_instances["async_rollout"].extract_step(*args, **kwargs) == 2


@pytest.mark.parametrize("wrong", ["bad", "sample_1", None])
async def test_a_call_without_an_id_is_refused_before_it_is_made(wrong: str | None, tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, "async_rollout"))
    samples = Samples()
    with pytest.raises(ValueError, match="sample"):
        await samples.generate({"text": "p"}, wrong)
    assert samples.calls == []
    SkipManager.init({})
    assert await samples.generate("p", wrong or "any") == {"of": wrong or "any"}


async def test_the_trainers_step_and_the_order_of_samples_are_never_mixed(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, "async_rollout", steps=[7]))
    SkipManager.set_step(1)
    samples = Samples()
    for _ in range(2):
        assert await samples.generate("p", "sample_0_7") == {"of": "sample_0_7"}
    await samples.generate("p", "sample_0_1")
    assert samples.calls == ["sample_0_7", "sample_0_1"]
    assert (folder(tmp_path) / "7").is_dir()
    assert not (folder(tmp_path) / "1").exists()


def test_the_page_says_what_must_not_be_decorated_by_its_place_in_the_feed() -> None:
    page = (Path(__file__).parents[3] / "docs/skip.md").read_text(encoding="utf-8")
    assert "Where calls run concurrently, prefer a step that is read from each call" in page
    assert "Do not decorate a function that is called once for each sample *of a group* by its position" in page


async def test_64_samples_at_once_each_get_their_own(tmp_path: Path) -> None:
    ends = [asyncio.Event() for _ in range(64)]
    begun: list[int] = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(prompts: int, sample_id: str) -> dict[str, Any]:
        begun.append(prompts)
        if len(begun) == 64:
            ends[order[0]].set()
        await ends[prompts].wait()
        later = order.index(prompts) + 1
        if later < 64:
            ends[order[later]].set()
        return {"of": prompts, "id": sample_id}

    order = random.Random(1).sample(range(64), 64)
    SkipManager.init(config(tmp_path, "async_rollout", steps=list(range(64))))
    for _ in range(2):
        calls = [generate(number, f"sample_0_{number}") for number in range(64)]
        results = await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
        assert results == [{"of": number, "id": f"sample_0_{number}"} for number in range(64)]
    assert sorted(begun) == list(range(64))


@pytest.mark.parametrize("action", ["cache", "repeat"])
async def test_64_concurrent_misses_are_one_execution(action: str, tmp_path: Path) -> None:
    """Of one step, or of 64 steps where any dump will do."""
    SkipManager.init(config(tmp_path, "async_rollout", steps=list(range(64)), action=action))
    samples = Samples()
    ids = [f"sample_{number}_{0 if action == 'cache' else number}" for number in range(64)]
    results = await asyncio.wait_for(asyncio.gather(*(samples.generate("p", each) for each in ids)), LIMIT_S)
    assert len(samples.calls) == 1
    assert results == [{"of": samples.calls[0]}] * 64
    first_step = samples.calls[0].rpartition("_")[2]
    assert [path.name for path in folder(tmp_path).iterdir() if path.is_dir()] == [first_step]


async def test_an_execution_that_fails_leaves_the_step_to_the_next(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, "async_rollout"))
    calls: list[str] = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(prompts: str, sample_id: str) -> str:
        calls.append(prompts)
        await asyncio.sleep(0)
        if len(calls) < 3:
            raise ConnectionError("no engine")
        return prompts

    tried = await asyncio.gather(*(generate(str(n), "sample_0_1") for n in range(5)), return_exceptions=True)
    assert len(calls) == 3
    assert [type(tried[int(each)]) for each in calls] == [ConnectionError, ConnectionError, str]
    assert [each for each in tried if isinstance(each, str)] == [calls[2]] * 3


async def test_a_call_that_is_cancelled_leaves_the_step_to_the_next(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path, "async_rollout"))
    begun = asyncio.Event()
    calls: list[int] = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(prompts: str, sample_id: str) -> str:
        calls.append(1)
        begun.set()
        if len(calls) == 1:
            await asyncio.Event().wait()
        return "made"

    first = asyncio.create_task(generate("p", "sample_0_1"))
    await begun.wait()
    second = asyncio.create_task(generate("p", "sample_0_1"))
    third = asyncio.create_task(generate("p", "sample_0_1"))
    await asyncio.sleep(0)
    first.cancel()
    third.cancel()
    assert await asyncio.wait_for(second, LIMIT_S) == "made"
    assert len(calls) == 2
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_what_cannot_be_dumped_makes_nobody_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else a stream under a cold ``repeat`` would be generated one sample after the other."""
    SkipManager.init(config(tmp_path, "async_rollout", steps=list(range(9)), action="repeat"))
    running: list[int] = []
    all_run = asyncio.Event()

    @SkipManager.annotate(role="async_rollout")
    async def generate(prompts: int, sample_id: str) -> object:
        running.append(prompts)
        if len(running) == 9:
            all_run.set()
        if len(running) > 1:
            await all_run.wait()
        return object()

    calls = [generate(number, f"sample_0_{number}") for number in range(9)]
    await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
    assert len(running) == 9
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "training continues" in warnings[0].getMessage()
    assert "register_codec" in warnings[0].getMessage()


LISTENING = """
import asyncio, sys, threading
from forebay.replay.skip import SkipManager
on_loop, opened, held = threading.get_ident(), [], []
def listen(event, args):
    if event.partition(".")[0] in ("open", "os", "fcntl", "shutil") and sys.argv[1] in str(args[:1]):
        (held if threading.get_ident() == on_loop else opened).append((event, args[0]))
fields = {"enable": True, "dump_dir": sys.argv[1], "steps": [1, 2, 3], "action": "repeat"}
SkipManager.init({"skip": {"async_rollout": fields}})
@SkipManager.annotate(role="async_rollout")
async def generate(prompts, sample_id):
    return prompts
async def main():
    for sample_id in ("sample_0_1", "sample_0_1", "sample_0_3"):
        await generate("p", sample_id)
sys.addaudithook(listen)
asyncio.run(main())
assert any("gen_batch.json" in str(path) for event, path in opened), opened
print(held)
"""


def test_neither_a_dump_nor_a_load_is_on_the_event_loop(tmp_path: Path) -> None:
    assert run_python(LISTENING, tmp_path / "dumps") == "[]\n"


async def test_methods_of_a_class_may_be_coroutine_functions() -> None:
    kept: dict[int, Any] = {}
    variable = contextvars.ContextVar("variable", default=0)

    @register_skip("awaited")
    class Awaited(BaseSkip):
        async def meet_precondition(self, step: int, *_: Any, **__: Any) -> bool:  # type: ignore[override]
            await asyncio.sleep(0)
            return step in kept

        async def warp_function(self, step: int, *_: Any, **__: Any) -> Any:
            return kept[step]

        async def prepare_data(self, step: int, result: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
            kept[step] = (result, variable.get())

    @SkipManager.annotate(role="awaited")
    async def work() -> str:
        return "made"

    SkipManager.init({"skip": {"awaited": {"enable": True, "steps": [1]}}})
    SkipManager.set_step(1)
    variable.set(5)
    assert [await work(), await work()] == ["made", ("made", 5)]


ROLLOUTER = """
import asyncio, sys, time
from pathlib import Path
from forebay.replay.skip import SkipManager
dump_dir, action, role = sys.argv[1:4]
SkipManager.init({"skip": {role: {"enable": True, "dump_dir": dump_dir, "steps": [1, 2, 3], "action": action}}})
SkipManager.set_step(1)
calls = Path(dump_dir) / "calls"
def execute():
    with calls.open("a") as file:
        file.write("called\\n")
@SkipManager.annotate(role="rollout")
def generate(prompts, sample_id):
    execute()
    time.sleep(0.15)  # longer than the other one takes to get here
    return prompts
@SkipManager.annotate(role="async_rollout")
async def stream(prompts, sample_id):
    execute()
    await asyncio.sleep(0.15)
    return prompts
print("ready", flush=True)
sys.stdin.readline()
ids = ["sample_0_1"] if action == "cache" else ["sample_0_1", "sample_0_2", "sample_0_3"]
async def main():
    return await asyncio.gather(*(stream("made", each) for each in ids))
print(generate("made", "x") if role == "rollout" else asyncio.run(main())[0])
"""


@pytest.mark.parametrize(("role", "action"), [("rollout", "cache"), ("async_rollout", "repeat")])
def test_two_processes_share_dumps_and_one_execution(role: str, action: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", ROLLOUTER, str(tmp_path), action, role]
    two = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in two:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in two:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in two:
        printed, errors = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, printed, errors) == (0, "made\n", "")
    assert (tmp_path / "calls").read_text() == "called\n"


FORKING = """
import os, sys, time
from forebay.replay.skip import SkipManager
SkipManager.init({"skip": {"rollout": {"enable": True, "dump_dir": sys.argv[1], "steps": [1]}}})
SkipManager.set_step(1)
@SkipManager.annotate(role="rollout")
def generate():
    if os.fork() == 0:
        os.close(1); os.close(2); time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
generate()
"""


def test_a_lock_dies_with_its_holder_is_no_forked_childs_and_is_named_where_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rollout may fork workers, which outlive it."""
    monkeypatch.setattr(manager, "LOGGED_EVERY_S", 0.0)
    command = [sys.executable, "-P", "-c", FORKING, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    SkipManager.init({"skip": {"rollout": {"enable": True, "dump_dir": str(tmp_path), "steps": [1]}}})
    rollouts = Rollouts()
    waiting = threading.Thread(target=rollouts.at, args=(1,))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting.start()
        deadline = time.monotonic() + LIMIT_S
        while "another call holds it" not in caplog.text and time.monotonic() < deadline:
            waiting.join(0.01)
        assert (rollouts.calls, ".1.lock" in caplog.text) == ([], True)
        holder.kill()
        waiting.join(LIMIT_S)
        assert rollouts.calls == ["p"]
    finally:
        os.killpg(holder.pid, 9)
        holder.wait()
        holder.stdout.close()
