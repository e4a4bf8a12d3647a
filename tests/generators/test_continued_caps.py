"""``broken: "continue"``: at its cap a rollout gives its place up, and goes on from its tokens where it is sent."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.client import AsyncBufferClient
from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from forebay.generators.base import BaseGenerator, query_single_turn, single_turn
from tests.conftest import MakeServer
from tests.generators.bench_kit import LIMIT_S, bench, reward
from tests.generators.capping_kit import install_capping
from tests.kit import ServerProcess
from tests.lent import lend_runs

pytestmark = pytest.mark.usefixtures("with_and_without_workers")

CAP = 8
LONG = "one two three "


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        server = module_servers(env=install_capping(tmp_path_factory.mktemp("policies") / "site"))
        lend_runs(server)
        yield server


def continuing(**options: Any) -> dict[str, Any]:
    return {"policy": "capping", "broken": "continue", "options": {"caps": {"1": CAP}, **options}}


def is_capped(call: ScriptedCall) -> bool:
    return "-0001-" in (call.rid or "")


def say(call: ScriptedCall) -> str:
    """The whole answer, or the rest of what was said already."""
    return f"{LONG}{int(is_capped(call))}".removeprefix(call.said)


async def two_turns(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    messages, _ = await single_turn(client, messages, params | {"max_tokens": CAP})
    return await single_turn(client, [*messages, {"role": "user", "content": "again"}], params)


async def streamed(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    chunks = await client.chat.completions.create(model="m", messages=messages, stream=True, **params)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
    return [*messages, {"role": "assistant", "content": text}], "stop"


async def side_by_side(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    chats = [[{"role": "user", "content": text}] for text in "xyz"]
    answers = await asyncio.gather(*(single_turn(client, chat, params) for chat in chats))
    client.rollout.extra_info["answers"] = [answer[-1]["content"] for answer, _ in answers]
    return [*messages, *(answer[-1] for answer, _ in answers)], "stop"


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_a_call_at_the_cap_goes_on_from_its_tokens_at_the_engine_that_is_chosen(
    buffer, write_rows, lending, rollout
) -> None:
    async with ScriptedEngine(say) as first, ScriptedEngine(say) as second, asyncio.timeout(LIMIT_S):
        options = {"first_at": first.url, "again_at": second.url}
        buffer.plan |= {"scheduler": continuing(**options)}
        engines = f"{first.url},{second.url}"
        generator = BaseGenerator(engines, buffer.url, num_repeat_per_sample=2, max_attempts=1)
        totals = await generator.run_async(write_rows({"instance_id": "a", "prompt": "a"}), rollout, reward)
    (fast,) = [call for call in first.calls if is_capped(call)]
    (slow,) = second.calls
    assert (fast.limit, slow.said) == (CAP, LONG[:CAP])
    assert slow.limit is None or slow.limit > CAP
    assert (totals.counts["rollouts_continued"], totals.counts["tokens_broken"]) == (1, 0)
    assert "rollouts_broken" not in totals.counts
    (sample,) = [each for each in buffer.samples if each["messages"][-1]["content"] == f"{LONG}1"]
    assert sum(sample["loss_mask"]) == len(f"{LONG}1") + 1
    assert [each["extra_info"].get("segments") is not None for each in buffer.samples].count(True) == 1


async def test_later_turns_wait_for_their_new_place_as_well(lending, tmp_path) -> None:
    async with bench(lending, tmp_path, say, two_turns, "a", scheduler=continuing()) as run:
        rows = await run.read(1)
        totals = await run.running
    assert {row["messages"][-1]["content"] for row in rows} == {f"{LONG}0", f"{LONG}1"}
    assert totals.counts["rollouts_continued"] == 1
    assert [call.limit for call in run.engine.calls if is_capped(call)][:1] == [CAP]
    assert len([call for call in run.engine.calls if is_capped(call)]) == 2


async def test_what_cannot_be_gone_on_with_runs_again(lending, tmp_path) -> None:
    async with bench(lending, tmp_path, say, streamed, "a", scheduler=continuing()) as run:
        await run.read(1)
        totals = await run.running
    assert (totals.counts["rollouts_broken"], totals.counts["tokens_broken"]) == (1, CAP)
    assert "rollouts_continued" not in totals.counts


async def test_calls_side_by_side_go_on_together(lending, tmp_path) -> None:
    async with bench(lending, tmp_path, say, side_by_side, "a", scheduler=continuing()) as run:
        rows = await run.read(1)
        totals = await run.running
    answers = [row["extra_info"]["answers"] for row in rows if "answers" in row["extra_info"]]
    assert [f"{LONG}1"] * 3 in answers
    assert totals.counts["rollouts_continued"] == 1
    assert (totals.num_completed, totals.num_failed) == (2, 0)


async def test_a_rollout_that_waits_has_no_place_and_its_group_may_close(lending, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    more = {
        "scheduler": continuing(again_once=str(tmp_path / "never"), told_in=str(broken)),
        "oversampling": {"rollouts_per_group": 3},
    }

    async def script(call: ScriptedCall) -> str:
        while "-0002-" in (call.rid or "") and not broken.exists():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
        return f"{LONG}{call.number}"

    async with bench(lending, tmp_path, script, single_turn, "a", **more) as run:
        totals = await run.running
    assert (totals.num_completed, totals.num_failed) == (2, 0)
    assert (totals.counts["rollouts_aborted"], totals.counts["tokens_aborted"]) == (1, CAP)


async def test_a_held_run_goes_on_with_it_in_its_next_step(lending, tmp_path: Path) -> None:
    may_go_on = tmp_path / "go on"

    def script(call: ScriptedCall) -> str:
        return f"1{call.number}" if call.prompt == "a" and not call.said else say(call)

    oversampling = {"groups_per_step": 1, "leftover": "keep"}
    waits = continuing(again_once=str(may_go_on))
    async with bench(lending, tmp_path, script, single_turn, "ab", scheduler=waits, oversampling=oversampling) as run:
        await run.until(lambda stats: stats.is_held)
        assert {row["instance_id"] for row in await run.read(1)} == {"a"}
        may_go_on.touch()
        await run.client.set_weight_version(1)
        rows = await run.read(1)
    assert {row["messages"][-1]["content"] for row in rows} == {f"{LONG}0", f"{LONG}1"}


async def test_a_rollout_that_ends_while_it_waits_is_no_longer_started(lending, tmp_path: Path) -> None:
    late: list[str] = []

    async def impatient(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(1.0 if client.rollout.slot == 1 else None):
                return await single_turn(client, messages, params)
        except TimeoutError:
            late.append(client.rollout.uid)
            if len(late) == 2:  # of both groups
                (tmp_path / "go on").touch()
            return [*messages, {"role": "assistant", "content": "too late 7"}], "stop"

    waits = continuing(again_once=str(tmp_path / "go on"))
    async with bench(lending, tmp_path, say, impatient, "ab", scheduler=waits) as run:
        rows = await run.read(2)
        totals = await run.running
    assert [row["messages"][-1]["content"] for row in rows].count("too late 7") == 2
    assert (totals.num_completed, totals.num_failed) == (4, 0)
    assert isinstance(run.client, AsyncBufferClient)
