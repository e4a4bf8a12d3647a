"""Groups that are lost to what nobody meant: told by the log, the run's alarm, the command line."""

import re
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import IDLE, Json, NativeRun, ServerProcess, make_group, write_generator

OUTSIDE: list[float | None] = [-1.0, -2.0]
OWN_FILTER = """
def filter_item(item, task_type):
    return item["reward"] >= 0
"""
OWN_VALIDITY = """
def is_valid_group(group, min_valid_group_size, task_type):
    return len(group[1]) >= min_valid_group_size, len(group[1]) >= min_valid_group_size
"""
RAISES = """
def normalize_group_data(group):
    if group[1][0]["reward"] == 1.0:
        raise RuntimeError("it broke")
    return group
"""


def task_type(server: ServerProcess, name: str, hooks: str) -> str:
    """The task type of a generator file with these hooks, whose samples the test writes."""
    write_generator(server.generators, IDLE.replace('"idle"', f'"{name}"') + hooks, f"{name}_generator.py")
    return name


def write_groups(run: NativeRun, first: int, count: int, rewards: list[float | None], **changes: Any) -> None:
    run.write(*[sample for n in range(first, first + count) for sample in make_group(n, rewards, **changes)])


def write_failed(run: NativeRun, first: int, count: int, num_failed: int = 2) -> None:
    for number in range(first, first + count):
        samples = make_group(number, [0.5, 1.0])
        run.write(*[sample | ({"status": "failed"} if n < num_failed else {}) for n, sample in enumerate(samples)])


def alarm(run: NativeRun) -> Json | None:
    told: Json | None = run.view()["alarm"]
    return told


def lines_with(server: ServerProcess, text: str) -> list[str]:
    return [line for line in server.log().splitlines() if text in line]


@pytest.mark.parametrize("hooks", ["", OWN_VALIDITY])
def test_groups_outside_the_range_raise_an_alarm_with_the_range_seen_and_the_remedy(
    make_server: MakeServer, hooks: str
) -> None:
    server = make_server()
    run = server.start_run(task_type(server, "ranged", hooks), group_size=2, reward_range=[0, 1])
    write_groups(run, 0, 11, [0.0, 1.0])
    write_groups(run, 100, 20, [2.5, -3.0])
    write_groups(run, 200, 9, OUTSIDE)
    while run.read(num_groups=1)["batch_id"]:
        pass
    told = alarm(run)
    assert told is not None
    assert told["reasons"] == {"filtered": 29}
    for part in ("29 of 40 finished groups", "within [-3, 2.5]", "reward_range is [0, 1]", "null for any finite"):
        assert part in told["message"]
    [line] = lines_with(server, "finished groups were lost so far")
    assert "WARNING" in line
    assert "reward_range is [0, 1]" in line
    details = {group["detail"] for group in run.groups(state="discarded")}
    assert "0 of 2 items were kept: its rewards are within [-3, 2.5], reward_range is [0, 1]" in details
    server.kill9()
    server.restart()
    assert alarm(run) == told


def test_few_losses_and_losses_of_few_groups_raise_none(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, reward_range=[0, 1])
    write_groups(run, 0, 19, OUTSIDE)
    run.read(num_groups=1)
    assert run.view()["discarded"] == {"filtered": 19}
    assert alarm(run) is None
    write_groups(run, 100, 1, [0.0, 1.0])
    run.take(num_groups=1)
    assert alarm(run) is not None
    write_groups(run, 200, 170, [0.0, 1.0])
    run.take(num_groups=170)
    assert alarm(run) is None, "19 of 190 are 10 %"
    run.stop()


def test_the_share_is_a_setting(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, reward_range=[0, 1], alarm_lost_ratio=1)
    write_groups(run, 0, 30, OUTSIDE)
    run.read(num_groups=1)
    assert (run.view()["discarded"], alarm(run)) == ({"filtered": 30}, None)
    run.stop()


@pytest.mark.parametrize("what", ["equal", "own filter", "stale"])
def test_equal_rewards_hooks_of_ones_own_and_staleness_are_no_loss(server: ServerProcess, what: str) -> None:
    name = task_type(server, "own_filter", OWN_FILTER) if what == "own filter" else "idle"
    run = server.start_run(name, group_size=2, reward_range=[0, 1], max_staleness=0, alarm_after_groups=1_000)
    rewards: list[float | None] = [0.5, 0.5] if what == "equal" else [0.0, 1.0] if what == "stale" else [-1.0, -2.0]
    write_groups(run, 0, 30, rewards, **({"weight_version": 1} if what == "stale" else {}))
    if what == "stale":
        run.client.put(f"{run.path}/weight_version", json={"weight_version": 5}).raise_for_status()
    run.read(num_groups=1)
    reason = {"equal": "invalid", "own filter": "filtered", "stale": "stale"}[what]
    assert (run.view()["discarded"], alarm(run)) == ({reason: 30}, None)
    run.stop()


@pytest.mark.parametrize(("num_failed", "reason"), [(2, "failed"), (1, "invalid")])
def test_failures_are_told_also_where_one_reward_is_left(server: ServerProcess, num_failed: int, reason: str) -> None:
    run = server.start_run(group_size=2)
    write_groups(run, 0, 20, [0.0, 1.0])
    write_failed(run, 100, 5, num_failed)
    run.take(num_groups=20)
    assert run.view()["discarded"] == {reason: 5}
    told = alarm(run)
    assert told is not None
    assert told["reasons"] == {"failed": 5}
    assert f"`forebay status {run.run_id} --log 50`" in told["message"]
    run.stop()


def test_groups_that_time_out_are_told(server: ServerProcess) -> None:
    run = server.start_run(group_size=2, group_timeout_seconds=0.3, alarm_after_groups=1_000)
    run.wait_for_state("running")
    write_groups(run, 0, 25, [1.0])
    run.closed(25)
    told = alarm(run)
    assert told is not None
    assert told["reasons"] == {"timed_out": 25}
    assert "group_timeout_seconds" in told["message"]
    assert "1 of 2 samples arrived" in told["message"]
    run.stop()


def test_rows_that_failures_took_on_a_slime_route_are_told(server: ServerProcess) -> None:
    run = server.start_slime("short", group_size=2, contract="B", alarm_after_groups=1_000)
    write_failed(run, 0, 25, num_failed=1)
    assert run.fetch()["success"] is False
    assert run.view()["discarded"] == {"incomplete": 25}
    told = alarm(run)
    assert told is not None
    assert told["reasons"] == {"incomplete": 25}
    run.stop()


def test_each_reason_is_logged_once(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(task_type(server, "raises", RAISES), group_size=2, reward_range=[0, 1])
    write_groups(run, 0, 25, [7.0, 8.0])
    run.read(num_groups=1)
    write_groups(run, 100, 10, [1.0, 0.0])
    run.read(num_groups=1)
    write_groups(run, 200, 10, [7.0, 8.0])
    run.read(num_groups=1)
    told = alarm(run)
    assert told is not None
    assert told["reasons"] == {"filtered": 35, "hook_failed": 10}
    lines = lines_with(server, "finished groups were lost so far")
    assert [re.findall(r"\d+ (\w+): ", line)[-1] for line in lines] == ["filtered", "hook_failed"]
