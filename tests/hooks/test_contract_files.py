"""Generator files written for slime alone, in a real hook host: bound by position, slime's numbers."""

import json
import statistics
from typing import Any

import pytest

from forebay.core.errors import HookFailed
from forebay.hooks import HookRunner, Processed, Sizes

SIZES = Sizes(group_size=4, min_valid_group_size=3, min_valid_item_size=2)

FULL_A = """
def is_valid_group(group_data, min_valid_group_size, task_type):
    instance_id, items = group_data
    done = len(items) >= min_valid_group_size
    return done and any(i["reward"] for i in items), done

def filter_item(sample, kind):
    if sample["reward"] >= 0:
        return True

def normalize_group_data(batch, epsilon=1e-8, algo="grpo"):
    for item in batch[1]:
        item["raw_reward"], item["reward"] = item["reward"], item["reward"] - 0.5
        item["algo"] = algo
    return batch

def pad_group_data(group, size):
    return group[0], (group[1] * size)[:size]

def get_group_data_meta_info(temp):
    return {"ids": [repr(key) for key in temp], "counts": [len(v) for v in temp.values()]}
"""

FULL_B = """
def is_valid_group(group, size, task_type="task"):
    return len(group[1]) >= size

def normalize_group_data(group):
    raise RuntimeError("B never calls this")

def filter_item(item, task_type):
    raise RuntimeError("B never calls this")

def transform_group(group, task_type):
    instance_id, samples = group
    return instance_id, [{**s, "reward": s["reward"] * 10} for s in samples]
"""


def bodies(processed: Processed) -> list[dict[str, Any]]:
    assert all(row.body is not None for row in processed.rows)
    return [json.loads(row.body or b"") for row in processed.rows]


def z_scores(rewards: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + 1e-8) for reward in rewards]


async def test_every_function_of_contract_a_is_called(make_file: Any, make_runner: Any, make_group: Any) -> None:
    async with make_runner(make_file(FULL_A)) as runner:
        verdict = await runner.judge(make_group([0.0, 0.0, 0.0]), SIZES)
        assert (verdict.is_valid, verdict.is_finished) == (False, True)
        assert runner.contract == "A"
        done = await runner.process(make_group([0.0, -1.0, 1.0], turns=2), SIZES)
        assert (done.num_kept, done.is_filtered) == (2, False)
        assert [item["reward"] for item in bodies(done)] == [-0.5, 0.5, -0.5, 0.5]
        assert [(row.source, row.reward, row.raw_reward) for row in done.rows[:2]] == [(0, -0.5, 0.0), (2, 0.5, 1.0)]
        assert bodies(done)[1]["algo"] == "grpo"
        assert bodies(done)[1]["turns"] == 2
        told = await runner.meta_info([make_group([1.0], 1), make_group([1.0], "1"), make_group([0.5, 0.5], 1)])
        assert told == {"ids": ["1", "'1'"], "counts": [3, 1]}


async def test_what_a_file_of_contract_a_leaves_out_is_built_in(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    path = make_file("def filter_item(item, task_type): return item['extra_info']['row'] != 1")
    async with make_runner(path) as runner:
        done = await runner.process(make_group([0.0, 0.9, 1.0, 0.25]), SIZES)
    scores = [score * 4 / 3 for score in z_scores([0.0, 1.0, 0.25])]
    expected = [scores[0] / 2, scores[1], scores[2], scores[0] / 2]
    assert [item["reward"] for item in bodies(done)] == pytest.approx(expected, abs=1e-9)
    assert [item["raw_reward"] for item in bodies(done)] == [0.0, 1.0, 0.25, 0.0]


async def test_a_file_with_only_a_validity_pair_gets_built_in_rows_without_decoding_bodies(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    async with make_runner(make_file("def is_valid_group(g, n, t): return True, True")) as runner:
        await runner.judge(make_group([0.0, 1.0]), SIZES)
        done = await runner.process(make_group([0.0, 1.0]), SIZES)
    assert [(row.source, row.raw_reward, row.body) for row in done.rows] == [(0, 0.0, None), (1, 1.0, None)] * 2
    assert [row.reward for row in done.rows] == pytest.approx(z_scores([0.0, 1.0]) * 2, abs=1e-9)


async def test_under_b_the_first_bool_decides_and_nothing_of_a_is_called(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    async with make_runner(make_file(FULL_B)) as runner:
        assert runner.contract is None
        short = await runner.judge(make_group([0.0, 0.5, 1.0]), SIZES)
        assert (short.is_valid, short.is_finished) == (False, False)
        full = await runner.judge(make_group([0.5] * 4), SIZES)
        assert (full.is_valid, full.is_finished) == (True, True)
        assert runner.contract == "B"
        done = await runner.process(make_group([0.0, 0.5, -2.0, 1.0]), SIZES)
    assert [item["reward"] for item in bodies(done)] == [0.0, 5.0, -20.0, 10.0]
    assert all("raw_reward" not in item for item in bodies(done))
    assert all(row.raw_reward is None for row in done.rows)


@pytest.mark.parametrize(
    ("declared", "source", "size"),
    [
        (None, "def is_valid_group(g, n, t): return n == 3, True", 3),
        (None, "def is_valid_group(g, n, t): return n == 4", 4),
        (None, "def transform_group(g, t): return g\ndef is_valid_group(g, n, t): return n == 3, True", 3),
        ("B", "def is_valid_group(g, n, t): return n == 4", 4),
        (None, "CONTRACT = 'B'\ndef is_valid_group(g, n, t): return n == 4", 4),
    ],
)
async def test_the_size_argument_is_that_of_the_contract_from_the_first_answer_on(
    make_file: Any, make_runner: Any, make_group: Any, declared: Any, source: str, size: int
) -> None:
    async with make_runner(make_file(source), contract=declared) as runner:
        for _ in range(2):
            assert (await runner.judge(make_group([0.0]), SIZES)).is_valid
        assert runner.contract == ("A" if size == 3 else "B")


@pytest.mark.parametrize(
    ("declared", "source"),
    [
        ("A", "def is_valid_group(g, n, t): return True"),
        ("B", "def is_valid_group(g, n, t): return True, True"),
        (None, "def is_valid_group(g, n, t): return (True, True) if len(g[1]) == 1 else True"),
    ],
)
async def test_an_answer_of_the_other_contract_is_a_failure(
    make_file: Any, make_runner: Any, make_group: Any, declared: Any, source: str
) -> None:
    async with make_runner(make_file(source), contract=declared) as runner:
        if declared is None:
            await runner.judge(make_group([0.0]), SIZES)
        with pytest.raises(HookFailed, match=r"as in contract [AB]"):
            await runner.judge(make_group([0.0, 1.0]), SIZES)


async def test_coroutines_are_completed_on_one_loop(make_file: Any, make_runner: Any, make_group: Any) -> None:
    source = """
    import asyncio
    loops = []
    async def is_valid_group(g, n, t):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return loops[0] is loops[-1], True
    async def filter_item(i, t):
        return i["reward"] > 0.1
    """
    async with make_runner(make_file(source)) as runner:
        for _ in range(2):
            assert (await runner.judge(make_group([0.0]), SIZES)).is_valid
        assert (await runner.process(make_group([0.0, 0.5, 1.0]), SIZES)).num_kept == 2


async def test_ids_and_values_survive_the_way_through_the_host(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    path = make_file("CONTRACT = 'B'\ndef transform_group(g, t): return g")
    fields = {"big": 2**70, "text": "é\ud800", "deep": [{"a": [None, True, 1e-300]}], "exact": 0.1}
    async with make_runner(path) as runner:
        for instance_id in (7, "7", 2**70):
            done = await runner.process(make_group([0.5], instance_id, **fields), SIZES)
            item = bodies(done)[0]
            assert (type(item["instance_id"]), item["instance_id"]) == (type(instance_id), instance_id)
            assert {name: item[name] for name in fields} == fields


async def test_too_few_items_after_the_filter_is_told(make_file: Any, make_runner: Any, make_group: Any) -> None:
    async with make_runner(make_file("def filter_item(i, t): return i['reward'] > 0.9")) as runner:
        done = await runner.process(make_group([0.0, 0.5, 1.0]), SIZES)
    assert (done.rows, done.num_kept, done.is_filtered) == ([], 1, True)


async def test_without_user_hooks_everything_is_in_process_and_bodies_are_not_read(make_group: Any) -> None:
    async def unread() -> list[bytes]:
        raise AssertionError("bodies were read")

    async with HookRunner(task_type="task", plugins=False) as runner:
        assert not any(runner.in_host(stage) for stage in ("judge", "process", "meta_info"))
        group = make_group([0.0, 1.0, 0.5])
        group.bodies = unread
        assert (await runner.judge(group, SIZES)).is_valid
        done = await runner.process(group, SIZES)
        assert [row.source for row in done.rows] == [0, 1, 2, 0]
        assert (await runner.meta_info([group, group]))["num_groups"] == 1
        assert runner.implementations()["filter_item"] == ["built-in"]
    async with HookRunner(task_type="task", plugins=False, contract="B") as runner:
        done = await runner.process(group, SIZES)
        assert [(row.reward, row.raw_reward) for row in done.rows] == [(0.0, None), (1.0, None), (0.5, None)]


async def test_who_answers_each_hook_is_told(make_file: Any, make_runner: Any, make_group: Any) -> None:
    path = make_file("def filter_item(i, t): return True\ndef get_group_data_meta_info(d): return {}")
    async with make_runner(path) as runner:
        before = runner.implementations()
        assert runner.in_host("judge")
        assert runner.in_host("process")
        assert runner.in_host("meta_info")
        await runner.judge(make_group([0.5]), SIZES)
        assert runner.implementations() == before
    assert before["filter_item"] == ["file task_generator.py", "built-in"]
    assert before["pad_group_data"] == ["built-in"]
    assert before["run_started"] == []
