"""Rollouts with a cap: their calls are bounded, at the cap they are broken, and run again without having failed."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.generators.base import Totals, query_single_turn, single_turn
from tests.conftest import MakeServer
from tests.generators.bench_kit import HANGS, bench
from tests.generators.capping_kit import install_capping
from tests.kit import ServerProcess, poll_until, write_generator
from tests.lent import lend_runs

pytestmark = pytest.mark.usefixtures("with_and_without_workers")

CAP = 8
LONG = "one two three "
KILLED = """
import os
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "killed"
async def reward(item):
    return float(item["uid"][-1])
def run_rollout(data):
    with open(data["pids"], "a") as file:
        file.write(f"{os.getpid()} ")
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward)
"""


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose runs' addresses the tests get; it has the policy too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        server = module_servers(env=install_capping(tmp_path_factory.mktemp("policies") / "site"))
        lend_runs(server)
        yield server


def capping(caps: dict[str, int] | None = None, **options: Any) -> dict[str, Any]:
    return {"policy": "capping", "options": {"caps": {"1": CAP} if caps is None else caps, **options}}


def is_capped(call: ScriptedCall) -> bool:
    """Whether it is of the rollout that has a cap."""
    return "-0001-00-" in (call.rid or "")


def say(call: ScriptedCall) -> str:
    """The same for everybody, with a number that ``reward`` looks for."""
    return f"{LONG}{call.number}"


def once(broken: Path) -> Any:
    """A script that lets the last rollout of a group end once there is this file."""

    async def script(call: ScriptedCall) -> str:
        while "-0002-" in (call.rid or "") and not broken.exists():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
        return say(call)

    return script


# --- rollout functions, by what they do; each is given its prompt's first word


def _with(messages: list[Any], content: str) -> Any:
    return [*messages, {"role": "assistant", "content": content}], "stop"


async def plain(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    return await single_turn(client, messages, params)


async def own_limit(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    cut, reason = await single_turn(client, messages, params | {"max_tokens": CAP})
    return _with(cut, f"cut: {reason} {client.rollout.slot}")


async def turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    for _ in range(3):
        messages, _ = await single_turn(client, messages, params | {"max_completion_tokens": 3, "max_tokens": None})
        messages = [*messages, {"role": "user", "content": "more"}]
    return _with(messages, str(client.rollout.slot))


async def nothing_left(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    first, _ = await single_turn(client, messages, params | {"max_tokens": CAP})
    return await single_turn(client, [*first, {"role": "user", "content": "and"}], params)


async def stream(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    chunks = await client.chat.completions.create(model="m", messages=messages, stream=True, **params)
    return _with(messages, "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]))


async def side_by_side(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    async def ask(text: str) -> str:
        return (await single_turn(client, [{"role": "user", "content": text}], params))[0][-1]["content"]

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(text)) for text in ("slow", "fast")]
    return _with(messages, asked[1].result())


async def swallow(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    try:
        return await single_turn(client, messages, params)
    except BaseException:  # noqa: BLE001 - what a user's code may do
        return _with(messages, "I give up 7")


def in_thread_plain(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    return query_single_turn(client, messages, params)


def in_thread_stream(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    chunks = client.chat.completions.create(model="m", messages=messages, stream=True, **params)
    return _with(messages, "".join([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]))


def in_thread_side_by_side(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    def ask(text: str) -> str:
        return query_single_turn(client, [{"role": "user", "content": text}], params)[0][-1]["content"]

    # It waits for both calls: the slow one has to be ended at its engine.
    with ThreadPoolExecutor() as pool:
        return _with(messages, list(pool.map(ask, ["slow", "fast"]))[1])


FUNCTIONS = [plain, own_limit, turns, nothing_left, stream, side_by_side, swallow]
IN_THREADS = [in_thread_plain, in_thread_stream, in_thread_side_by_side]


async def each(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    return await FUNCTIONS["abcdefg".index(messages[0]["content"])](client, messages, params)


def each_in_thread(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    return IN_THREADS["abc".index(messages[0]["content"])](client, messages, params)


@dataclass
class Outcome:
    """What came of a run with one group for each function."""

    names: list[str]
    calls: list[ScriptedCall]
    totals: Totals
    rows: list[dict[str, Any]]
    counts: dict[str, int]
    tokens: dict[str, Any]

    def limits(self, name: str, attempt: int) -> list[int | None]:
        """What the calls of the capped rollout's attempt were bounded by, in their order."""
        group = next(row["rollout_id"].split("-")[0] for row in self.rows if row["instance_id"] == self._row(name))
        own = [call for call in self.calls if f"{group}-0001-{attempt:02x}-" in (call.rid or "")]
        return [call.limit for call in sorted(own, key=lambda call: call.rid or "")]

    def texts(self, name: str) -> list[str]:
        return [row["messages"][-1]["content"] for row in self.rows if row["instance_id"] == self._row(name)]

    def _row(self, name: str) -> str:
        return "abcdefg"[self.names.index(name)]


hanging: list[ScriptedCall] = []


async def script(call: ScriptedCall) -> str | Reply:
    if call.prompt == "slow" and is_capped(call):
        hanging.append(call)
        return HANGS
    has_to_wait = call.prompt == "fast" and is_capped(call)
    while has_to_wait and not any(hangs_beside(call, slow) for slow in hanging):  # noqa: ASYNC110
        await asyncio.sleep(0.005)  # no event tells what was said
    return say(call)


def hangs_beside(call: ScriptedCall, slow: ScriptedCall) -> bool:
    """Whether the slow call of the same rollout has said what it says."""
    of, beside = ((each.rid or "").rpartition("-")[0] for each in (call, slow))
    return of == beside and slow.sampled_ids == HANGS.tokens()


async def _outcome(lending: ServerProcess, folder: Path, rollout: Any, functions: list[Any]) -> Outcome:
    rows = "abcdefg"[: len(functions)]
    async with bench(lending, folder, script, rollout, rows, scheduler=capping()) as run:
        read = await run.read(len(rows))
        totals = await run.running
        stats = await run.client.stats()
    names = [function.__name__ for function in functions]
    return Outcome(names, run.engine.calls, totals, read, stats.counts, stats.tokens)


@pytest.fixture(scope="module")
def outcome(lending: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return asyncio.run(_outcome(lending, tmp_path_factory.mktemp("async"), each, FUNCTIONS))


@pytest.fixture(scope="module")
def threads(lending: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return asyncio.run(_outcome(lending, tmp_path_factory.mktemp("threads"), each_in_thread, IN_THREADS))


def test_a_rollout_at_its_cap_is_broken_and_runs_again_uncapped(outcome: Outcome) -> None:
    assert outcome.limits("plain", 0) == [CAP]
    [uncapped] = outcome.limits("plain", 1)
    assert uncapped is None or uncapped > CAP
    assert all(text.startswith(LONG) for text in outcome.texts("plain"))


def test_nothing_failed_and_no_retry_was_used(outcome: Outcome, threads: Outcome) -> None:
    # The runs allow one attempt.
    assert (outcome.totals.num_completed, outcome.totals.num_failed) == (14, 0)
    assert (threads.totals.num_completed, threads.totals.num_failed) == (6, 0)
    assert "rollouts_failed" not in outcome.counts
    assert outcome.counts["rollouts_finished"] == 14


def test_what_was_broken_is_counted(outcome: Outcome, threads: Outcome) -> None:
    hung = len("one two ")
    assert outcome.counts["rollouts_broken"] == 6  # all but the one with a limit of its own
    assert outcome.counts["tokens_broken"] - 6 * CAP in (0, hung)  # a cancelled call may tell nothing
    assert (threads.counts["rollouts_broken"], threads.counts["tokens_broken"]) == (3, 3 * CAP + hung)
    assert outcome.tokens["wasted"] == outcome.counts["tokens_broken"]


def test_a_call_that_ends_at_its_own_limit_is_no_broken_one(outcome: Outcome) -> None:
    assert outcome.limits("own_limit", 0) == [CAP]
    assert outcome.limits("own_limit", 1) == []
    assert sorted(outcome.texts("own_limit")) == ["cut: length 0", "cut: length 1"]


def test_turns_are_bounded_by_what_those_before_have_left(outcome: Outcome) -> None:
    assert outcome.limits("turns", 0) == [3, 3, CAP - 6]
    assert outcome.limits("turns", 1) == [3, 3, 3]


def test_nothing_is_asked_for_once_nothing_is_left(outcome: Outcome) -> None:
    assert outcome.limits("nothing_left", 0) == [CAP]
    assert len(outcome.limits("nothing_left", 1)) == 2


def test_the_reader_of_a_stream_is_told_at_its_end(outcome: Outcome, threads: Outcome) -> None:
    for run, name in ((outcome, "stream"), (threads, "in_thread_stream")):
        assert run.limits(name, 0) == [CAP]
        assert all(text.startswith(LONG) for text in run.texts(name))


def test_other_calls_of_a_broken_rollout_end_at_their_engines(outcome: Outcome, threads: Outcome) -> None:
    for run, name in ((outcome, "side_by_side"), (threads, "in_thread_side_by_side")):
        assert run.limits(name, 0) == [CAP, CAP]
        assert [call.finished for call in run.calls if call.reply is HANGS] in (["abort"], ["disconnected"])


def test_a_function_that_swallows_it_makes_no_sample(outcome: Outcome) -> None:
    assert all(text.startswith(LONG) for text in outcome.texts("swallow"))


async def test_what_goes_on_after_an_abort_is_bounded_too(lending, tmp_path) -> None:
    async def script(call: ScriptedCall) -> str | Reply:
        return Reply(text="one", hang=True) if is_capped(call) and not call.said else say(call)

    async with bench(lending, tmp_path, script, single_turn, "a", scheduler=capping()) as run:
        calls = run.engine.calls
        while not (hung := [call for call in calls if call.reply.hang and len(call.sampled_ids) == 3]):  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # no event tells what was said
        hung[0].aborted.set()
        await run.read(1)
        totals = await run.running
    assert [call.limit for call in run.engine.calls if is_capped(call)] == [CAP, CAP - 3]
    assert totals.counts["tokens_broken"] == CAP


async def test_a_group_that_closes_ends_a_broken_rollout_that_waits(lending, tmp_path) -> None:
    broken = tmp_path / "broken"
    more = {
        "scheduler": capping(again_once=str(tmp_path / "never"), told_in=str(broken)),
        "oversampling": {"rollouts_per_group": 3},
    }
    async with bench(lending, tmp_path, once(broken), single_turn, "a", **more) as run:
        totals = await run.running
    assert totals.counts["rollouts_broken"] == 1
    assert (totals.num_completed, totals.num_failed) == (2, 0)
    assert len([call for call in run.engine.calls if "-0001-" in (call.rid or "")]) == 1


async def test_a_held_run_starts_nothing_broken_again_before_its_next_step(lending, tmp_path: Path) -> None:
    may_go_on = tmp_path / "go on"
    held = {
        "scheduler": capping(again_once=str(may_go_on)),
        "oversampling": {"groups_per_step": 1, "leftover": "keep"},
    }

    broken = asyncio.Event()

    async def script(call: ScriptedCall) -> str | Reply:
        if call.prompt != "a":
            return say(call)
        await broken.wait()  # else the run may be held before
        return f"1{call.number}"

    async with bench(lending, tmp_path, script, single_turn, "ab", **held) as run:
        await run.until(lambda stats: stats.counts.get("rollouts_broken"))
        broken.set()
        await run.until(lambda stats: stats.is_held)
        assert {row["instance_id"] for row in await run.read(1)} == {"a"}
        may_go_on.touch()
        assert await run.client.read(num_groups=1, wait_s=0.3) is None
        await run.client.set_weight_version(1)
        assert {row["instance_id"] for row in await run.read(1)} == {"b"}


def test_a_run_that_is_killed_while_a_broken_rollout_waits_runs_that_one_alone_again(lending, tmp_path: Path) -> None:
    write_generator(lending.generators, KILLED, "killed_generator.py")
    rows, pids, broken, may_go_on = (tmp_path / name for name in ("rows.jsonl", "pids", "broken", "go on"))
    rows.write_text('{"instance_id": "a", "prompt": "a"}\n')
    scheduler = capping(again_once=str(may_go_on), told_in=str(broken))
    with ScriptedEngine(say).in_thread() as engine:
        run = lending.start_run(
            "killed",
            group_size=2,
            input_file=str(rows),
            remote_engine_url=engine.url,
            scheduler=scheduler,
            pids=str(pids),
            max_attempts=1,
        )
        poll_until(broken.exists)
        poll_until(lambda: run.view()["samples"].get("member") == 1)
        os.kill(int(pids.read_text()), signal.SIGKILL)
        may_go_on.touch()
        poll_until(lambda: run.view()["state"] == "finished")
        assert run.view()["samples"]["member"] == 2
    asked = [(call.rid or "")[-11:-4] for call in engine.calls]
    assert sorted(asked) == ["0000-00", "0001-00", "0001-00", "0001-01"]
