"""``forebay bias``, against a real server: which rules that drop groups are found to bend the data, and which not."""

import asyncio
import json
import random
from itertools import accumulate
from typing import Any

import pytest
from scipy.stats import ks_2samp

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.server.cli.bias import Bias, ks_p_value
from forebay.telemetry.analysis.robust import ks_distance
from tests.cli.conftest import Forebay
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_sample, write_generator

PICKY = """
TASK_TYPE = "picky_{name}"
def is_valid_group(group, n, task_type):
    instance, items = group
    is_dropped = ({rule}) and str(instance)[-1] != "7"
    return len(items) >= n and not is_dropped, len(items) >= n
def run_rollout(data):
    import threading
    threading.Event().wait()
"""
TIMEOUT_S = 6.0
"""A time-out that must not pass before the next step of a test."""
RULES = {
    "long": 'max(len(item["tokens"]) for item in items) > 450',
    "high": 'sum(item["reward"] for item in items) > 1.3',
}


@pytest.fixture(scope="module")
def picky(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    for name, rule in RULES.items():
        write_generator(server.generators, PICKY.format(name=name, rule=rule), f"{name}_generator.py")
    return server


def group_of(name: str, chance: random.Random, num: int = 2, **changes: Any) -> list[Json]:
    """Samples whose lengths and rewards have nothing to do with each other."""

    def sample(slot: int) -> Json:
        tokens = [1] * int(min(5_000, chance.lognormvariate(5.5, 0.8)) + 1)
        given = {"tokens": tokens, "reward": chance.random(), "weight_version": 0} | changes
        return make_sample(uid=f"{name}/{slot}", instance_id=name, epoch=0, slot=slot, **given)

    return [sample(slot) for slot in range(num)]


def take_all(run: NativeRun) -> None:
    while run.read(num_groups=1)["batch_id"]:
        pass


def bias_of(forebay: Forebay, run: NativeRun) -> Json:
    found: Json = json.loads(forebay("bias", run.run_id, "--url", run.server.url, "--json").out)
    return found


def rows_of(report: Json, kind: str) -> dict[str, Json]:
    return {each["feature"]: each for each in report["comparisons"] if each["kind"] == kind}


@pytest.mark.parametrize(("name", "feature", "start"), [
    ("long", "tokens", "is_valid_group discards long rollouts: median "),
    ("high", "reward", "is_valid_group discards rollouts of high reward: mean "),
])  # fmt: skip
def test_a_filter_of_the_user_is_named_by_what_it_prefers(
    forebay: Forebay, picky: ServerProcess, name: str, feature: str, start: str
) -> None:
    run, chance = picky.start_run(f"picky_{name}", group_size=2), random.Random(name)
    run.send(sample for number in range(200) for sample in group_of(f"{name}{number}", chance))
    take_all(run)
    shown = forebay("bias", run.run_id, "--url", run.server.url)
    assert shown.out.startswith(start), shown.out + shown.err
    report = bias_of(forebay, run)
    assert [(each["kind"], each["feature"]) for each in report["comparisons"] if each["is_biased"]] == [
        ("invalid", feature)
    ]
    values: dict[str, list[float]] = {"acked": [], "leased": [], "discarded": []}
    for group in run.groups(samples=True):
        of_one = [each["num_tokens"] if feature == "tokens" else each["reward"] for each in group["samples"]]
        values[group["state"]].append(sum(of_one) / 2)
    row, expected = rows_of(report, "invalid")[feature], ks_2samp(values["discarded"], values["leased"])
    assert (row["num"], row["num_delivered"]) == (len(values["discarded"]), len(values["leased"]))
    assert row["distance"] == pytest.approx(expected.statistic)
    assert row["p"] < 1e-6 > expected.pvalue
    assert sum(each["dropped"] for each in report["deciles"]) == row["num"]
    assert report["epochs"] == [{"epoch": 0, "instances": 200, "never_delivered": row["num"]}]


def test_the_deadline_surplus_and_what_a_checkpoint_finds_in_flight(forebay: Forebay, server: ServerProcess) -> None:
    run, chance = server.start_run(group_size=2, group_timeout_seconds=TIMEOUT_S), random.Random(1)

    def surplus(name: str, number: int) -> Json:
        return group_of(f"{name}{number}", chance, 3, tokens=[1] * 1_500)[2]

    run.client.put(f"{run.path}/weight_version", json={"weight_version": 1})
    for number in range(40):
        run.send([*group_of(f"fast{number}", chance, tokens=[1] * (100 + number)), surplus("fast", number)])
    take_all(run)
    run.send(group_of(f"flies{number}", chance, tokens=[1] * 900)[0] for number in range(40))
    run.checkpoint(1)
    run.send(group_of(f"flies{number}", chance, tokens=[1] * 900)[1] for number in range(40))
    take_all(run)
    run.send(surplus("flies", number) for number in range(40))
    run.send(group_of(f"slow{number}", chance, tokens=[1] * 20)[0] for number in range(80))
    run.closed(160)
    # The samples that 40 of them lacked; the other 40 are not known to have been short.
    run.send(group_of(f"slow{number}", chance, tokens=[1] * 4_000)[1] for number in range(40))
    report = bias_of(forebay, run)
    judged = [each for each in report["comparisons"] if each["p"] is not None]
    raw = sorted(ks_p_value(each["distance"], each["num"], each["num_delivered"]) for each in judged)
    corrected = [min(1.0, (len(raw) - rank) * p) for rank, p in enumerate(raw)]  # after Holm, if they ascend
    assert sorted(each["p"] for each in judged) == pytest.approx(list(accumulate(corrected, max)))
    deadline = rows_of(report, "timed_out")
    assert [deadline[name]["num"] for name in ("tokens", "seconds")] == [40, 80]
    assert [each["feature"] for each in deadline.values() if each["is_biased"]] == ["seconds", "tokens"]
    assert deadline["seconds"]["median"] == pytest.approx(TIMEOUT_S, rel=0.5)
    assert "The deadline discards long rollouts: median 2,010 against 520 tokens, D = 1.00" in report["findings"]
    tokens = {kind: rows_of(report, kind)["tokens"] for kind in ("surplus", "late", "in_flight")}
    assert [(row["median"], row["num"]) for row in tokens.values()] == [(1_500, 40), (1_500, 40), (900, 40)]
    assert all(row["is_biased"] for row in tokens.values())
    assert rows_of(report, "in_flight")["staleness"]["mean"] == 1
    assert report["findings"][-1].startswith("A resume that drops what is in flight at a checkpoint would discard")
    assert [each["drop_rate"] for each in report["deciles"]] == [0] * 5 + [1] * 5
    assert report["epochs"] == [{"epoch": 0, "instances": 160, "never_delivered": 80}]


def test_aborted_rollouts_are_compared_with_finished_ones(forebay: Forebay, make_server: MakeServer) -> None:
    server, num_rows = make_server(), 32
    write_generator(server.generators, BASE, "spares_generator.py")
    rows = server.directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instance_id": n, "prompt": f"row {n}"}) + "\n" for n in range(num_rows)))

    async def deliver() -> NativeRun:
        spare, calls = Reply(text="word " * 60, hang=True), dict[str, list[ScriptedCall]]()

        async def script(call: ScriptedCall) -> str | Reply:
            of_row = calls.setdefault(call.messages[-1]["content"], [])
            of_row.append(call)
            if (number := len(of_row)) == 3:
                return spare
            while len(of_row) < 3 or of_row[2].sampled_ids != spare.tokens():  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # no event reports what was said
            return f"short answer {number}"

        async with ScriptedEngine(script) as engine:
            given = {"remote_engine_url": engine.url, "num_process": 3 * num_rows, "input_file": str(rows)}
            given["oversampling"] = {"rollouts_per_group": 3}
            run = await asyncio.to_thread(server.start_run, "spares", 2, **given)
            batch = await asyncio.to_thread(run.read, num_groups=num_rows, wait_s=50)
            assert len(batch["data"]) == 2 * num_rows
            await asyncio.to_thread(run.wait_for_state, "finished")
        return run

    report = bias_of(forebay, asyncio.run(deliver()))
    assert report["findings"][0].startswith("Aborting what is not needed discards long rollouts: median ")
    assert rows_of(report, "aborted")["tokens"]["num"] == num_rows


BASE = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "spares"
async def reward(item):
    return float(item["messages"][-1]["content"].split()[-1]) / 3
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward)
"""


def test_random_losses_bend_nothing(server: ServerProcess) -> None:
    run, chance = server.start_run(group_size=4), random.Random(0)
    run.client.put(f"{run.path}/weight_version", json={"weight_version": 3})
    run.send(sample for number in range(300) for sample in group_of(f"g{number}", chance, 4))
    take_all(run)
    groups, found = run.groups(samples=True), 0
    for seed in range(100):
        chance, bias = random.Random(seed), Bias(4, [])
        for whole in groups:
            group = whole | {"samples": [dict(sample) for sample in whole["samples"]]}
            if chance.random() < 0.3:
                group |= {"state": "discarded", "reason": chance.choice(["filtered", "hook_failed", "unreadable"])}
            elif chance.random() < 0.5:
                chance.choice(group["samples"])["outcome"] = chance.choice(["late", "surplus"])
            bias.add_group(group)
        found += not bias.report()["findings"][0].startswith("No dropping rule bends the data")
    assert found <= 5


def test_what_a_stop_cuts_off_is_not_blamed_on_the_deadline(forebay: Forebay, server: ServerProcess) -> None:
    run, chance, unaware = server.start_run(group_size=2, group_timeout_seconds=10.0), random.Random(3), Bias(2, [])
    run.send(sample for number in range(40) for sample in group_of(f"whole{number}", chance))
    take_all(run)
    run.send(group_of(f"half{number}", chance)[0] for number in range(40))
    run.stop()
    run.closed(80)
    report = bias_of(forebay, run)
    assert report["findings"] == ["Nothing was dropped yet"]
    assert report["epochs"] == [{"epoch": 0, "instances": 40, "never_delivered": 0}]
    for group in run.groups(samples=True):
        unaware.add_group(group)
    assert unaware.report()["findings"][0].startswith("The deadline discards slow rollouts: median ")


def test_a_run_without_losses_or_deliveries_or_of_few_groups_is_not_judged(
    forebay: Forebay, server: ServerProcess
) -> None:
    run = server.start_run(group_size=2)
    assert bias_of(forebay, run)["findings"] == ["Nothing was dropped yet"]
    run.send(group_of("b", random.Random(2), reward=1.0))
    assert run.read(num_groups=1, wait_s=0)["batch_id"] is None
    assert bias_of(forebay, run)["findings"] == ["Dropped 1 group and delivered none: nothing to compare"]
    run.send(group_of("a", random.Random(2)))
    take_all(run)
    assert bias_of(forebay, run)["findings"] == ["Fewer than 30 groups to compare: invalid"]


def test_distances_and_probabilities_are_those_of_scipy() -> None:
    for step in range(5):
        chance, means = random.Random(step), ((0, 80), (0.2 * step, 150))
        left, right = ([round(chance.gauss(mean, 1), 1) for _ in range(num)] for mean, num in means)
        expected = ks_2samp(left, right, method="asymp")
        assert ks_distance(left, right) == pytest.approx(expected.statistic)
        assert ks_p_value(ks_distance(left, right), 80, 150) == pytest.approx(expected.pvalue, rel=0.2, abs=1e-4)
