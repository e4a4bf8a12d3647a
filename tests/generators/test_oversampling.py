"""Over-sampling: more rollouts than a group needs, more groups than a step needs, through a real server and engine."""

import asyncio
from typing import Any

import pytest

from forebay.core.clock import ActiveClock, ManualClock
from forebay.core.errors import InvalidInput
from forebay.core.ids import group_id
from forebay.core.task_row import TaskRow
from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from forebay.generators.base import BaseGenerator, query_single_turn, single_turn
from forebay.generators.buffer_link.abc import Plan
from forebay.generators.rollouts.open_group import GroupPlan, OpenGroup
from tests.conftest import MakeServer
from tests.generators.bench_kit import HANGS, LIMIT_S, Script, bench, reward
from tests.kit import ServerProcess
from tests.lent import lend_runs

pytestmark = pytest.mark.usefixtures("with_and_without_workers")


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    """A server whose runs' addresses the tests get."""
    server = module_servers()
    lend_runs(server)
    return server


async def fails_on_bad(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    messages, finish_reason = await single_turn(client, messages, params)
    if "bad" in messages[-1]["content"]:
        raise ValueError("bad")
    return messages, finish_reason


def keep(groups_per_step: int = 1) -> dict[str, Any]:
    return {"groups_per_step": groups_per_step, "leftover": "keep"}


def discard(groups_per_step: int = 1) -> dict[str, Any]:
    return {"groups_per_step": groups_per_step, "leftover": "discard"}


async def test_the_first_to_end_fill_a_group_and_the_others_are_aborted(lending, tmp_path) -> None:
    script = Script(num_hung=2, a=["1", "2", HANGS])
    async with bench(lending, tmp_path, script, rows="a", oversampling={"rollouts_per_group": 4}) as run:
        rows = await run.read(1)
        assert sorted(row["messages"][-1]["content"] for row in rows) == ["1", "2"]
        assert sorted(row["slot"] for row in rows) == [0, 1]
        await run.engine.wait_in_flight(0)
        totals = await run.running
        assert await run.reads_nothing()
        stats = await run.client.stats()
    assert [call.finished for call in run.engine.calls].count("abort") == 2
    assert (totals.num_completed, totals.num_failed) == (2, 0)
    assert {name: stats.counts[name] for name in ("rollouts_finished", "rollouts_aborted")} == {
        "rollouts_finished": 2,
        "rollouts_aborted": 2,
    }
    assert stats.tokens["wasted"] == 2 * len("one two ")
    assert stats.tokens["mean_aborted"] > stats.tokens["mean_finished"]


async def test_a_spare_takes_the_place_of_a_rollout_that_failed(lending, tmp_path) -> None:
    script = Script(a=["bad", "1", "2"])
    async with bench(lending, tmp_path, script, fails_on_bad, "a", oversampling={"rollouts_per_group": 3}) as run:
        rows = await run.read(1)
        await run.running
        stats = await run.client.stats()
    assert [row["status"] for row in rows] == ["completed", "completed"]
    assert stats.samples["member"] == 2
    assert "failed" not in stats.samples
    assert stats.counts["rollouts_failed"] == 1


async def test_failed_rollouts_fill_the_slots_that_no_spare_is_left_for(lending, tmp_path) -> None:
    script = Script(a=["bad", "bad", "1"])
    async with bench(lending, tmp_path, script, fails_on_bad, "a", oversampling={"rollouts_per_group": 3}) as run:
        await run.running
        stats = await run.client.stats()
    assert (stats.samples["member"], stats.samples["failed"]) == (1, 1)


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_what_a_step_does_not_need_is_kept_and_goes_on_from_its_tokens(lending, tmp_path, rollout) -> None:
    script = Script(num_hung=4, a=["1", "2"], b=[HANGS, HANGS, "three 3", "three 4"], c=[HANGS])
    async with bench(lending, tmp_path, script, rollout, oversampling=keep()) as run:
        await run.until(lambda stats: stats.is_held)
        await run.engine.wait_in_flight(0)
        assert {row["instance_id"] for row in await run.read(1)} == {"a"}
        await run.client.set_weight_version(1)
        rows = await run.read(1)
        assert [row["instance_id"] for row in rows] == ["b", "b"]
        assert sorted(row["messages"][-1]["content"] for row in rows) == ["one two three 3", "one two three 4"]
        assert (await run.client.stats()).discarded == {}
    continued = [call for call in run.engine.calls if call.said == "one two " and call.finished == "stop"]
    assert len(continued) == 2


async def test_deadlines_stand_still_while_a_run_is_held(lending, tmp_path) -> None:
    script = Script(num_hung=2, a=["1", "2"], b=[HANGS, HANGS, "three 3", "three 4"])
    limit_s = 6.0
    limits = {"group_timeout_seconds": limit_s, "group_deadline_seconds": limit_s}
    async with bench(lending, tmp_path, script, rows="ab", oversampling=keep(), **limits) as run:
        await run.until(lambda stats: stats.is_held)
        await run.read(1)
        assert await run.client.read(num_groups=1, wait_s=limit_s + 0.5) is None
        assert (await run.client.stats()).discarded == {}
        await run.client.set_weight_version(1)
        assert [row["instance_id"] for row in await run.read(1)] == ["b", "b"]
        assert (await run.client.stats()).discarded == {}


async def test_kept_rollouts_are_counted(lending, tmp_path) -> None:
    async with bench(lending, tmp_path, Script(num_hung=2, a=["1", "2"]), rows="ab", oversampling=keep()) as run:
        stats = await run.until(lambda stats: stats.counts.get("rollouts_held"))
    assert (stats.counts["steps_held"], stats.counts["rollouts_held"]) == (1, 2)
    assert stats.counts["tokens_held"] == 2 * len("one two ")
    assert stats.tokens["wasted"] == 0


@pytest.mark.parametrize("rollout", [single_turn, query_single_turn])
async def test_what_a_step_does_not_need_is_thrown_away_and_begins_afresh(lending, tmp_path, rollout) -> None:
    script = Script(num_hung=2, a=["1", "2"], b=[HANGS, HANGS, "3", "4"])
    async with bench(lending, tmp_path, script, rollout, "ab", oversampling=discard()) as run:
        await run.until(lambda stats: stats.is_held)
        await run.engine.wait_in_flight(0)
        await run.until(lambda stats: stats.counts.get("rollouts_aborted") == 2)
        assert (await run.client.stats()).samples["member"] == 2
        await run.client.set_weight_version(1)
        rows = [*await run.read(1), *await run.read(1)]
        stats = await run.client.stats()
    assert sorted(row["messages"][-1]["content"] for row in rows) == ["1", "2", "3", "4"]
    assert not [call for call in run.engine.calls if call.said]
    assert len({call.rid for call in run.engine.calls}) == len(run.engine.calls)
    assert stats.tokens["wasted"] == 2 * len("one two ")


def test_a_rollout_that_was_thrown_away_takes_no_slot_of_those_that_follow() -> None:
    row = TaskRow(0, "a", [{"role": "user", "content": "q"}], {})
    group = OpenGroup(Plan("run-0123456789ab", 2), GroupPlan(row, 0, (0, 1), (0, 1)), ActiveClock(ManualClock()))
    assert group.admit(1, is_failed=False) == 1
    fresh = group.afresh()
    assert group.admit(0, is_failed=False) is None
    assert fresh.admit(fresh.numbers[0], is_failed=False) == 0


async def test_a_group_that_comes_to_nothing_does_not_count(lending, tmp_path) -> None:
    def script(call: ScriptedCall) -> str:
        # Of any number of calls: those of the second group may be ended by the hold, and go on after it.
        return "1" if call.messages[-1]["content"] == "a" else str(call.number)

    async with bench(lending, tmp_path, script, rows="ab", oversampling=keep()) as run:
        rows = await run.read(1)
    assert {row["instance_id"] for row in rows} == {"b"}


async def test_no_more_groups_become_complete_than_a_step_needs(lending, tmp_path) -> None:
    def script(call: ScriptedCall) -> str:
        return str(call.number)

    async with bench(lending, tmp_path, script, rows="abcdef", oversampling=keep(2)) as run:
        for version in range(3):
            assert len(await run.read(2)) == 4
            await run.until(lambda stats: stats.is_held)
            assert await run.reads_nothing()
            await run.client.set_weight_version(version)
        totals = await run.running
    assert totals.num_completed == 12


async def test_the_same_version_told_again_begins_no_step(lending, tmp_path) -> None:
    script = Script(a=["1", "2"], b=["3", "4"], c=["5", "6"])
    async with bench(lending, tmp_path, script, oversampling=keep()) as run:
        await run.client.set_weight_version(7)
        await run.read(1)
        await run.until(lambda stats: stats.is_held)
        await run.client.set_weight_version(7)
        assert await run.client.read(num_groups=1, wait_s=0.3) is None
        await run.client.set_weight_version(6)  # a trainer that went back
        await run.read(1)


async def test_a_held_run_is_stopped_at_once(lending, tmp_path) -> None:
    async with bench(lending, tmp_path, Script(a=["1", "2"]), oversampling=keep()) as run:
        await run.until(lambda stats: stats.is_held)
        await run.client.stop()
        async with asyncio.timeout(LIMIT_S):
            assert (await run.running).is_stopped
        assert not (await run.client.stats()).is_held


async def test_a_process_that_follows_takes_no_uid_that_is_there(buffer, write_rows) -> None:
    run_id, group = buffer.plan["run_id"], group_id("a", 0)
    taken = f"{run_id}-{group}-0002"
    buffer.plan |= {"oversampling": {"rollouts_per_group": 3}, "taken": [["a", 0, [0], [taken]]], "is_resumed": True}
    async with ScriptedEngine(Script(a=["bad", "1"])) as engine, asyncio.timeout(LIMIT_S):
        generator = BaseGenerator(engine.url, buffer.url, max_attempts=1)
        await generator.run_async(write_rows({"instance_id": "a", "prompt": "a"}), fails_on_bad, reward)
    [sample] = buffer.samples
    assert sample["slot"] == 1
    assert sample["uid"] in {f"{run_id}-{group}-{number:04x}" for number in (1, 3)}


async def test_spares_also_help_a_buffer_of_slimes_kind(buffer, write_rows) -> None:
    async with ScriptedEngine(Script(num_hung=1, a=["bad", "1", "2", HANGS])) as engine, asyncio.timeout(LIMIT_S):
        oversampling = {"rollouts_per_group": "4"}
        generator = BaseGenerator(
            engine.url, buffer.root_url, num_repeat_per_sample=2, max_attempts=1, oversampling=oversampling
        )
        totals = await generator.run_async(write_rows({"instance_id": "a", "prompt": "a"}), fails_on_bad, reward)
    assert sorted(sample["messages"][-1]["content"] for sample in buffer.samples) == ["1", "2"]
    assert (totals.num_completed, totals.num_failed) == (2, 0)
    assert (totals.counts["rollouts_failed"], totals.counts["rollouts_aborted"]) == (1, 1)


async def test_a_buffer_that_tells_no_versions_cannot_hold_a_run(buffer, write_rows) -> None:
    generator = BaseGenerator("http://127.0.0.1:1", buffer.root_url, oversampling=keep())
    with pytest.raises(InvalidInput, match="groups_per_step needs a Forebay server"):
        await generator.run_async(write_rows({"prompt": "a"}), single_turn, reward)


@pytest.mark.parametrize(
    ("oversampling", "field"),
    [
        ({"rollouts_per_group": 1}, "rollouts_per_group"),
        ({"leftover": "keep", "groups_per_step": -1}, "groups_per_step"),
    ],
)
def test_wrong_oversampling_is_told_by_field(oversampling: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        BaseGenerator("http://e:1", "http://b:1", num_repeat_per_sample=2, oversampling=oversampling)
    assert caught.value.field == f"oversampling.{field}"
