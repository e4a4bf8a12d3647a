"""Every group ends in finite time: time-outs, salvage, late and surplus samples, over HTTP and across a crash."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, SlimeRun, make_group, make_sample, poll_until

LONG_S = 6.0
"""A time-out that must not pass before the next step of a test."""


@pytest.fixture
def run(server: ServerProcess) -> Iterator[NativeRun]:
    run = server.start_run(group_timeout_seconds=0.5)
    run.wait_for_state("running")
    yield run
    run.stop()


@pytest.fixture(scope="module")
def restartable(module_servers: MakeServer) -> ServerProcess:
    """A server that these tests kill."""
    return module_servers()


def test_a_timed_out_group_with_enough_samples_is_salvaged_and_padded(run: NativeRun) -> None:
    run.write(*make_group("short", [0.0, 1.0, 1.0]))
    [closed] = run.closed()
    assert (closed["state"], closed["reason"]) == ("ready", "")
    assert run.groups()[0]["is_salvaged"] is True
    batch = run.read(num_groups=1)
    assert [row["uid"] for row in batch["data"]] == ["short/0", "short/1", "short/2", "short/0"]


def test_a_timed_out_group_with_too_few_is_discarded_without_anybody_reading(run: NativeRun) -> None:
    run.write(*make_group("few", [0.0, 1.0]))
    [closed] = run.closed()
    assert (closed["state"], closed["reason"]) == ("discarded", "timed_out")
    assert run.groups()[0]["detail"] == "2 of 4 samples arrived"
    assert run.view()["discarded"] == {"timed_out": 1}
    run.write(*make_group("whole", [0.0, 1.0, 0.0, 1.0]))
    assert run.read(num_groups=1)["meta_info"]["finished_groups"] == ["whole", "few"]


def test_a_late_sample_is_stored_and_reopens_nothing(run: NativeRun) -> None:
    slow = server_run(run, group_timeout_seconds=LONG_S)
    slow.write(*make_group("g", [0.0, 1.0]))
    slow.closed()
    [late] = slow.write(make_sample(instance_id="g", uid="late"))
    assert (late["status"], late["outcome"]) == (200, "late")
    [group] = slow.groups()
    assert (group["state"], group["num_samples"]) == ("discarded", 2)
    assert [sample["outcome"] for sample in slow.group(group["group_id"])["samples"]] == ["member", "member", "late"]
    poll_until(lambda: slow.write(make_sample(instance_id="g"))[0]["outcome"] == "member")
    assert [(group["epoch"], group["state"]) for group in slow.groups()] == [(0, "discarded"), (1, "open")]
    slow.stop()


def server_run(run: NativeRun, **payload: Any) -> NativeRun:
    other = run.server.start_run(**payload)
    other.wait_for_state("running")
    return other


def test_of_the_next_pass_no_more_are_late_than_slots_were_empty(restartable: ServerProcess) -> None:
    """What ends it is their number: the time for late samples is long here."""
    run = short_group(restartable, "cap")
    assert [verdict["outcome"] for verdict in run.write(*one_pass("second", 8))] == ["late"] * 5 + ["member"] * 3
    assert [(group["epoch"], group["num_samples"]) for group in run.groups()] == [(0, 3), (1, 3)]
    run.stop()


def test_late_samples_stay_counted_after_a_kill_and_repeated_ones_count_once(restartable: ServerProcess) -> None:
    run = short_group(restartable, "count")
    for sample in one_pass("second", 2) * 2:
        assert run.send(sample).status_code == 200
    restartable.kill9()
    restartable.restart()
    run.wait_for_state("running")
    for sample in one_pass("third", 8):
        assert run.send(sample).status_code == 200
    first, second = (run.group(group["group_id"])["samples"] for group in run.groups())
    assert [view["uid"] for view in first if view["outcome"] == "late"] == [
        "second/0",
        "second/1",
        *uids("third", 0, 3),
    ]
    assert [(view["uid"], view["outcome"]) for view in second] == [(uid, "member") for uid in uids("third", 3, 8)]
    run.stop()


def short_group(server: ServerProcess, name: str) -> SlimeRun:
    """A run of a writer that sends no epochs, whose one group timed out with 3 of 8 samples."""
    run = server.start_slime(name, group_size=8, group_deadline_seconds=10)
    run.wait_for_state("running")
    for sample in one_pass("first", 3):
        assert run.send(sample).status_code == 200
    [closed] = run.closed()
    assert (closed["state"], closed["reason"]) == ("discarded", "timed_out")
    return run


def one_pass(name: str, num: int) -> list[Json]:
    return [make_sample(uid=uid, instance_id="task", reward=n % 2) for n, uid in enumerate(uids(name, 0, num))]


def uids(name: str, begin: int, end: int) -> list[str]:
    return [f"{name}/{n}" for n in range(begin, end)]


def test_a_sample_without_epoch_opens_the_next_epoch_once_its_group_is_full(run: NativeRun) -> None:
    for epoch in range(3):
        run.write(*[s | {"uid": f"{epoch}/{s['uid']}"} for s in make_group("g", [0.0, 1.0, 0.0, 1.0])])
    assert [(group["epoch"], group["num_samples"]) for group in run.groups()] == [(0, 4), (1, 4), (2, 4)]


def test_deadlines_count_on_after_a_kill_but_not_while_the_server_is_down(restartable: ServerProcess) -> None:
    server = restartable
    run = server.start_run(group_timeout_seconds=LONG_S, group_size=4)
    run.wait_for_state("running")
    run.write(*make_group("g", [0.0, 1.0]))
    server.kill9()
    down_since_s = time.monotonic()
    while time.monotonic() - down_since_s < LONG_S + 0.2:  # longer than the time-out: it must not count
        time.sleep(0.1)
    server.restart()
    assert [group["state"] for group in run.groups()] == ["open"]
    [closed] = run.closed()
    assert (closed["state"], closed["reason"]) == ("discarded", "timed_out")


@pytest.mark.soak
def test_after_a_crash_of_a_foreign_generator_missing_samples_come_first_then_surplus(
    restartable: ServerProcess,
) -> None:
    server = restartable
    run = server.start_slime("after-a-crash-of-a-f", group_size=4)
    run.wait_for_state("running")
    for sample in (*make_group("half", [0.0, 1.0]), *make_group("whole", [0.0, 1.0, 0.0, 1.0])):
        run.send(sample)
    server.kill9()
    server.restart()
    run.wait_for_state("running")
    assert run.client.get(f"{run.path}/skip_instance_ids").json()["skip_instance_ids"] == ["whole"]
    again = [make_sample(instance_id="half", uid=f"again/{n}", reward=n % 2) for n in range(4)]
    assert [run.write(sample)[0]["outcome"] for sample in again] == ["member", "member", "surplus", "surplus"]
    next_epoch = run.write(make_sample(instance_id="half", uid="next"))
    assert next_epoch[0]["outcome"] == "member"
    assert [(g["instance_id"], g["epoch"], g["num_samples"]) for g in run.groups()] == [
        ("half", 0, 4),
        ("whole", 0, 4),
        ("half", 1, 1),
    ]


def test_everything_acknowledged_is_there_after_a_kill(restartable: ServerProcess) -> None:
    server = restartable
    run = server.start_slime("everything-acknowled", group_size=4)
    run.wait_for_state("running")
    for number in range(6):
        for sample in make_group(number, [0.0, 1.0, 0.0, 1.0]):
            run.send(sample)
    run.send(make_sample(instance_id="open"))
    run.write(*make_group("flat", [1.0] * 4))
    assert len(run.fetch(batch_size=8)["data"]["data"]) == 8
    before = [(g["group_id"], g["state"], g["reason"], g["num_samples"]) for g in run.groups()]
    server.kill9()
    server.restart()
    assert [(g["group_id"], g["state"], g["reason"], g["num_samples"]) for g in run.groups()] == before
    rows = run.fetch(batch_size=16)["data"]["data"]
    assert [row["instance_id"] for row in rows] == [n for n in range(2, 6) for _ in range(4)]
