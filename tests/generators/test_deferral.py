"""Groups that a step does not wait for, put off to a step of their own, through a real server and engine."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.oversampling import parse_oversampling
from forebay.engines.scripted import Reply, ScriptedCall
from forebay.generators.base import BaseGenerator
from forebay.generators.job import dispatcher
from tests.conftest import MakeServer
from tests.generators.bench_kit import HANGS, Script, bench
from tests.kit import ServerProcess
from tests.lent import lend_runs

pytestmark = pytest.mark.usefixtures("with_and_without_workers")


@pytest.fixture(scope="module")
def lending(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    lend_runs(server)
    return server


def defer(groups_per_step: int = 1, groups_begun: int = 2, **more: Any) -> dict[str, Any]:
    return {"groups_per_step": groups_per_step, "groups_begun": groups_begun, "leftover": "defer", **more}


def asked(run: Any) -> Counter[str]:
    """How often each prompt was asked."""
    return Counter(call.messages[-1]["content"] for call in run.engine.calls)


async def stored(run: Any) -> int:
    return int((await run.client.stats()).samples.get("member", 0))


async def test_a_group_that_is_put_off_begins_afresh_in_a_step_of_its_own(lending, tmp_path) -> None:
    script = Script(num_hung=1, a=["1", "2"], b=["7", HANGS, "3", "4"], c=["5", "6"], d=["8", "9"])
    async with bench(lending, tmp_path, script, rows="abcd", oversampling=defer()) as run:
        await run.until(lambda stats: stats.is_held)
        await run.engine.wait_in_flight(0)
        assert {row["instance_id"] for row in await run.read(1)} == {"a"}
        assert await stored(run) == 2, "the sample of the other group was stored, though that is not whole"
        assert asked(run) == {"a": 2, "b": 2}
        await run.client.set_weight_version(1)
        rows = await run.read(1)
        assert sorted(row["messages"][-1]["content"] for row in rows) == ["3", "4"]
        await run.until(lambda stats: stats.is_held)
        assert asked(run) == {"a": 2, "b": 4}, "a long step begins no other group"
        await run.client.set_weight_version(2)
        assert {row["instance_id"] for row in await run.read(1)} < {"c", "d"}
        stats = await run.until(lambda stats: stats.is_held)
    assert stats.discarded == {}
    assert stats.counts["rollouts_aborted"] >= 2
    assert stats.samples["member"] == 6


async def test_a_long_step_has_no_spares(lending, tmp_path) -> None:
    script = Script(num_hung=3, a=["1", "2", "3"], b=[HANGS, HANGS, HANGS, "4", "5"], c=["6", "7", "8"])
    settings = defer(rollouts_per_group=3)
    async with bench(lending, tmp_path, script, rows="abc", oversampling=settings) as run:
        await run.until(lambda stats: stats.is_held)
        await run.read(1)
        await run.client.set_weight_version(1)
        assert {row["instance_id"] for row in await run.read(1)} == {"b"}
        assert asked(run)["b"] == 3 + 2


async def test_what_is_put_off_is_done_when_no_other_groups_are_left(lending, tmp_path) -> None:
    answers = {name: [str(number), str(number + 1)] for number, name in enumerate("ab")}
    script = Script(num_hung=2, **answers, c=[HANGS, HANGS, "3", "4"])
    async with bench(lending, tmp_path, script, rows="abc", oversampling=defer(2, 3)) as run:
        await run.until(lambda stats: stats.is_held)
        assert {row["instance_id"] for row in await run.read(2)} == {"a", "b"}
        await run.client.set_weight_version(1)
        assert {row["instance_id"] for row in await run.read(1)} == {"c"}
        await run.running


async def test_a_step_begins_another_group_for_one_that_comes_to_nothing(lending, tmp_path) -> None:
    def script(call: ScriptedCall) -> str:
        # The rewards of the first group are all the same: it is filtered out.
        return "1" if call.messages[-1]["content"] == "a" else str(call.number)

    async with bench(lending, tmp_path, script, rows="abc", oversampling=defer(1, 1)) as run:
        assert {row["instance_id"] for row in await run.read(1)} == {"b"}


async def test_every_group_is_delivered_once_over_many_steps(lending, tmp_path) -> None:
    rows, slow, goes_on = "abcdefghijkl", set("bdgk"), asyncio.Event()

    async def script(call: ScriptedCall) -> str:
        if call.messages[-1]["content"] in slow:
            await goes_on.wait()  # the first step does without these
        return str(call.number)

    delivered: Counter[str] = Counter()
    async with bench(lending, tmp_path, script, rows=rows, oversampling=defer(2, 3)) as run:
        for version in range(1, len(rows) // 2 + 1):
            delivered.update(row["instance_id"] for row in await run.read(2))
            goes_on.set()
            await run.client.set_weight_version(version)
        await run.running
        stats = await run.client.stats()
    assert delivered == dict.fromkeys(rows, 2)
    assert stats.discarded == {}


async def test_groups_that_were_not_begun_come_later_also_once_the_end_of_the_file_is_known(lending, tmp_path) -> None:
    rows, delivered = "abcdef", Counter[str]()
    async with bench(lending, tmp_path, lambda call: str(call.number), rows=rows, oversampling=defer(1, 12)) as run:
        for version in range(1, len(rows) + 1):
            delivered.update(row["instance_id"] for row in await run.read(1))
            await run.client.set_weight_version(version)
        await run.running
    assert delivered == dict.fromkeys(rows, 2)


async def test_another_group_begins_at_once_while_others_of_the_step_go_on(lending, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "LOOK_AGAIN_S", 3_600.0)

    def script(call: ScriptedCall) -> str | Reply:
        answers = {"a": "1", "b": HANGS}  # the rewards of the first group are all the same: it is filtered out
        return answers.get(call.messages[-1]["content"], str(call.number))

    async with bench(lending, tmp_path, script, rows="abc", oversampling=defer(2, 2)) as run:
        assert {row["instance_id"] for row in await run.read(1)} == {"c"}


async def test_a_trainer_that_takes_long_for_the_last_step_ends_no_run(lending, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "STUCK_S", 4.0)
    async with bench(lending, tmp_path, lambda call: str(call.number), rows="a", oversampling=defer(1, 1)) as run:
        await run.until(lambda stats: stats.is_held)
        await asyncio.sleep(5.0)  # it is time that is tried here
        await run.read(1)
        await run.client.set_weight_version(1)
        totals = await run.running
    assert totals.num_completed == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollouts_per_group": 3, "leftover": "defer"}, "needs groups_per_step"),
        ({"groups_per_step": 2, "groups_begun": 4}, "needs leftover 'defer'"),
        ({"groups_per_step": 4, "groups_begun": 2, "leftover": "defer"}, "at least groups_per_step"),
        ({"groups_per_step": 4, "groups_begun": 0, "leftover": "defer"}, "greater than or equal to 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        parse_oversampling(given)
    assert (refused.value.field or "").startswith("oversampling")
    with pytest.raises(InvalidInput):
        BaseGenerator("http://127.0.0.1:9", "http://127.0.0.1:9", 2, oversampling=given)
