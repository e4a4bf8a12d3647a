"""A run is replayed by the server alone: the same groups, batches and reasons, whatever happens meanwhile."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.client import BufferClient
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_group, poll_until, write_generator
from tests.replay.replay_kit import (
    HOOKED,
    SIZE,
    groups_of,
    plain,
    read_all,
    record,
    start_replay,
    until_ended,
    write_group,
)


@pytest.fixture(scope="module")
def shared(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, HOOKED, "hooked_generator.py")
    return module_servers(generators=folder, start_wait_s=60)


@pytest.fixture(scope="module")
def recorded(shared: ServerProcess) -> NativeRun:
    return record(shared, name="base")


def test_same_groups_batches_and_reasons(shared: ServerProcess, recorded: NativeRun) -> None:
    run = start_replay(shared, recorded.run_id)
    view = until_ended(run)
    assert (view["state"], view["reason"], view["task_type"]) == ("finished", "replayed", "idle")
    assert view["settings"]["group_size"] == SIZE
    again = start_replay(shared, "base")  # by its name, and not that of its replays
    until_ended(again)
    batches = read_all(run)
    assert [sorted({row["instance_id"] for row in rows}) for rows in batches] == [[f"{n}a", f"{n}b"] for n in (1, 2, 3)]
    assert read_all(again) == batches
    assert groups_of(run) == groups_of(recorded) == groups_of(again)
    view = run.view()
    assert view["replay"]["source"] == recorded.run_id
    assert view["replay"]["recorded_at_s"] == recorded.view()["created_at_s"]
    assert view["counts"] == {"replay_hits": 8 * SIZE, "replay_tokens": 7 * 7 * SIZE}
    assert view["weight_version"] is None


def test_a_body_is_the_recorded_one_with_one_more_field(shared: ServerProcess, recorded: NativeRun) -> None:
    run = shared.start_run("idle", SIZE, name="bodies")
    write_group(run, "x", [0.0, 1.0, 0.5, 0.25])
    rows = run.take(num_groups=1)["data"]
    run.stop()
    replayed = start_replay(shared, run.run_id)
    until_ended(replayed)
    again = replayed.take(num_groups=1)["data"]
    assert [plain(row) for row in again] == rows
    assert [list(row)[-1] for row in again] == ["replayed_from"] * SIZE
    assert again[0]["replayed_from"] == {"run_id": run.run_id, "uid": "x/0", "substitute": False}
    assert recorded.run_id != run.run_id


def test_steps_give_the_same_batches(shared: ServerProcess, recorded: NativeRun) -> None:
    whole = start_replay(shared, recorded.run_id)
    with BufferClient(shared.url) as client:
        part = NativeRun(shared, client.start(replay={"source": recorded.run_id, "steps": [2, 3]}).run_id)
    assert until_ended(part)["num_groups_total"] == 4
    until_ended(whole)
    assert read_all(part) == read_all(whole)[1:]


def test_what_is_stopped_early_counts_all_its_tokens(shared: ServerProcess) -> None:
    recorded = shared.start_run("idle", SIZE)
    for number in range(20):
        write_group(recorded, f"group {number}", [0.0, 1.0, 0.5, 0.25])
    recorded.stop()
    how = {"source": recorded.run_id}
    run = start_replay(shared, how, max_buffer_size=5 * SIZE)
    until_buffered(run, 5 * SIZE)
    run.stop()
    num_there = run.view()["samples"]["member"]
    assert run.view()["counts"] == {"replay_hits": num_there, "replay_tokens": 7 * num_there}
    shared.start_run("idle", SIZE, run_id=run.run_id, replay=how, max_buffer_size=30 * SIZE)
    assert until_ended(run)["counts"] == {"replay_hits": 20 * SIZE, "replay_tokens": 7 * 20 * SIZE}


def test_recorded_hooks_judge_though_their_file_is_gone(make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path / "tasks", HOOKED, "hooked_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    recorded = record(server, "hooked")
    assert groups_of(recorded)["spoilt", 0]["reason"] == "filtered"
    (tmp_path / "tasks" / "hooked_generator.py").write_text(HOOKED.replace('.get("is_spoilt")', '.get("other")'))
    today = start_replay(server, {"source": recorded.run_id, "code": "today"})
    assert today.view()["warnings"] == ["the generator's code changed since the recording: hooked_generator.py"]
    shutil.rmtree(tmp_path / "tasks")
    run = start_replay(server, recorded.run_id)
    for each in (run, today):
        until_ended(each)
    server.kill9()
    server.restart()
    read_all(run), read_all(today, size=1)
    assert groups_of(run) == groups_of(recorded)
    assert groups_of(today)["spoilt", 0]["reason"] == ""


def test_a_killed_server_goes_on_with_it(make_server: MakeServer) -> None:
    server = make_server()
    recorded = server.start_run("idle", SIZE, min_valid_group_size_ratio=0.25)
    for number in range(30):
        write_group(recorded, f"group {number}", [0.0, 1.0, 0.5, 0.25])
    recorded.stop()
    expected = read_all(recorded, size=1)
    run = start_replay(server, recorded.run_id, max_buffer_size=5 * SIZE)
    batches: list[list[Json]] = []
    for _ in range(3):
        until_buffered(run, 5 * SIZE)
        batches += [[plain(row) for row in run.take(num_groups=1)["data"]] for _ in range(4)]
        server.kill9()
        server.restart()
    assert run.view()["state"] == "running"

    def rest() -> list[list[Json]]:
        batches.extend(read_all(run, size=1))
        return batches if run.view()["has_ended"] else []

    assert poll_until(rest) == expected
    assert groups_of(run) == groups_of(recorded)
    view = run.view()
    assert view["counts"]["replay_hits"] == 30 * SIZE
    assert view["samples"].get("duplicate", 0) == 0


def until_buffered(run: NativeRun, number: int) -> None:
    poll_until(lambda: run.view()["samples"]["buffered"] == number)


def test_stopped_and_gone_on_with(make_server: MakeServer) -> None:
    server = make_server()
    recorded = record(server)
    run = start_replay(server, recorded.run_id, max_buffer_size=SIZE)
    until_buffered(run, SIZE)
    assert run.stop()["state"] == "stopped"
    again = start_replay(server, recorded.run_id, run_id=run.run_id, max_buffer_size=1000)
    assert again.run_id == run.run_id
    assert until_ended(run)["state"] == "finished"
    assert groups_of(run).keys() == groups_of(recorded).keys()
    other = server.client.post("/v1/runs", json={"task_type": "idle", "group_size": SIZE, "run_id": run.run_id})
    assert_error(other, 422, "invalid_input", "run_id")


def test_a_name_that_means_another_run_by_now_is_not_gone_on_with(make_server: MakeServer) -> None:
    server = make_server()
    recorded = record(server, name="base")
    run = start_replay(server, "base", max_buffer_size=SIZE)
    until_buffered(run, SIZE)
    run.stop()
    newer = server.start_run("idle", SIZE, name="base")
    write_group(newer, "1a", [1.0, 1.0, 0.0, 0.0])
    newer.stop()
    body = {"replay": "base", "run_id": run.run_id}
    error = assert_error(server.client.post("/v1/runs", json=body), 422, "invalid_input", "replay.source")
    assert recorded.run_id in error["hint"]
    start_replay(server, recorded.run_id, run_id=run.run_id, max_buffer_size=1000)
    until_ended(run)
    assert groups_of(run) == groups_of(recorded)


def test_over_slimes_routes(make_server: MakeServer, tmp_path: Path) -> None:
    """A server that replays for slime's own client, which knows nothing of it."""
    server = make_server(flags=["--replay", "base"], refuse_hold_s=0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instance_id": "x"}\n')
    first = server.client.post("/start_rollout", json={"task_type": "idle", "num_repeat_per_sample": "4"})
    assert_error(first, 404, "run_not_found")
    body = {"task_type": "idle", "num_repeat_per_sample": "4", "input_file": str(rows)}
    recorded = server.start_slime("base", input_file=str(rows), replay=None)  # not even by default
    for number in range(4):
        recorded.write(*make_group(f"g{number}", [0.0, 1.0, 0.5, 0.25]))
    recorded.stop()
    run = server.start_slime(input_file=str(rows))
    until_ended(run)
    assert f'forebay_run_counts_total{{count="replay_hits"}} {4.0 * SIZE}' in run.client.get("/metrics").text
    data: list[Any] = []
    while (reply := run.client.post("/get_rollout_data", json={})).status_code == 200 and reply.json()["success"]:
        data += reply.json()["data"]["data"]
    assert sorted(row["instance_id"] for row in data) == sorted(f"g{n}" for n in range(4) for _ in range(SIZE))
    assert run.view()["replay"]["source"] == recorded.run_id
    assert server.start_slime(input_file=str(rows)).run_id != recorded.run_id
    rows.write_text('{"instance_id": "y"}\n')
    other = server.client.post("/start_rollout", json=body)
    error = assert_error(other, 409, "replay_differs", "replay")
    assert "input_file" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "code", "field"),
    [
        ({"replay": "bas"}, 404, "run_not_found", None),
        ({"replay": "nothing.fbr"}, 404, "not_recorded", "replay.source"),
        ({"replay": "/dev/zero"}, 404, "not_recorded", "replay.source"),
        ({"replay": f"{'x' * 300}.fbr"}, 404, "not_recorded", "replay.source"),
        ({"replay": "/proc/self/mounts"}, 507, "recording_damaged", None),
        ({"replay": {"source": "base", "group_size": 1}}, 422, "invalid_input", "replay.group_size"),
        ({"replay": {"source": "base", "speed": 1}}, 422, "invalid_input", "replay.speed"),
        ({"replay": {"source": "base", "steps": "7"}}, 404, "not_recorded", "steps"),
        ({"replay": "base", "group_size": 5}, 409, "replay_differs", "replay"),
        ({"replay": "base", "sampling_params": {"temperature": 0.5}}, 409, "replay_differs", "replay"),
        ({"replay": "base", "workers": 2}, 422, "invalid_input", "workers"),
        ({"replay": {"source": "base", "ignore": ["grupsize"]}}, 422, "invalid_input", "replay.ignore"),
        ({"replay": {"source": "x.fbr", "code": "recorded"}}, 422, "invalid_input", "replay.code"),
    ],
)
def test_what_cannot_be_replayed(
    shared: ServerProcess, recorded: NativeRun, body: Json, status: int, code: str, field: str | None
) -> None:
    [newest] = shared.client.get("/v1/runs?limit=1").json()["runs"]
    error = assert_error(shared.client.post("/v1/runs", json=body), status, code, field)
    assert error["hint"]
    assert shared.client.get("/v1/runs?limit=1").json()["runs"][0]["run_id"] == newest["run_id"]
    assert recorded.view()["state"] == "stopped"


def test_what_differs_can_be_ignored(shared: ServerProcess, recorded: NativeRun) -> None:
    body = {"source": recorded.run_id, "ignore": ["group_size"]}
    run = start_replay(shared, body, group_size=2)
    until_ended(run)
    told = groups_of(run)
    assert {key: each["num_samples"] for key, each in told.items()} == dict.fromkeys(told, 2)


def test_bodies_that_retention_removed(make_server: MakeServer) -> None:
    """Refused, with the steps that are left; and what is being replayed is not removed."""
    server = make_server(segment_bytes=1 << 16, replay_bytes=0)
    recorded = server.start_run("idle", 2, keep_checkpoints=3)
    for step in range(1, 7):
        write_group(recorded, f"step {step}", [0.0, 1.0], messages=[{"role": "user", "content": "x" * 40_000}])
        recorded.checkpoint(step, recorded.take(num_groups=1, step=step))
        if step == 3:
            held = start_replay(server, recorded.run_id, max_buffer_size=2)
            until_buffered(held, 2)
        collect(server)
    assert len(read_all_waiting(held)) == 3
    held.checkpoint(1)
    collect(server)
    reply = server.client.post("/v1/runs", json={"replay": recorded.run_id})
    error = assert_error(reply, 409, "bodies_gone")
    assert error["hint"].endswith("still complete: 4-6")
    part = start_replay(server, {"source": recorded.run_id, "steps": "6"})
    until_ended(part)
    assert json.dumps(read_all(part, size=1)).count("step 6/") >= 2


def test_a_run_that_keeps_its_bodies_replays_whole_beside_one_that_does_not(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=1 << 16, replay_bytes=200_000)
    runs = [server.start_run("idle", 2, keep_checkpoints=2, **keeps) for keeps in ({}, {"keep_bodies": True})]
    read: dict[str, list[list[Json]]] = {run.run_id: [] for run in runs}
    for step in range(1, 9):
        for run in runs:
            write_group(run, f"step {step}", [0.0, 1.0], messages=[{"role": "user", "content": "x" * 40_000}])
            batch = run.take(num_groups=1, step=step)
            run.checkpoint(step, batch)
            read[run.run_id].append(batch["data"])
    for run in runs:
        run.stop()
    collect(server)
    server.kill9()
    server.restart()
    other, kept = runs
    whole = start_replay(server, kept.run_id)
    until_ended(whole)
    assert read_all(whole, size=1) == read[kept.run_id]
    error = assert_error(server.client.post("/v1/runs", json={"replay": other.run_id}), 409, "bodies_gone")
    first = int(error["hint"].rpartition("still complete: ")[2].removesuffix("-8"))
    assert 2 < first < 7, "there is room for some that no checkpoint needs"
    part = start_replay(server, {"source": other.run_id, "steps": f"{first}-8"})
    until_ended(part)
    assert read_all(part, size=1) == read[other.run_id][first - 1 :]
    body = {"replay": {"source": other.run_id, "steps": f"{first - 1}-8"}}
    assert_error(server.client.post("/v1/runs", json=body), 409, "bodies_gone")


def test_nothing_is_removed_while_a_start_is_looked_at(make_server: MakeServer, tmp_path: Path) -> None:
    """Its bodies were all there when it was asked for; its generator takes its time."""
    file = write_generator(tmp_path / "tasks", HOOKED, "hooked_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60, segment_bytes=1 << 16, replay_bytes=0)
    recorded = server.start_run("hooked", 2, keep_checkpoints=3)

    def step(number: int) -> None:
        write_group(recorded, f"step {number}", [0.0, 1.0], messages=[{"role": "user", "content": "x" * 40_000}])
        recorded.checkpoint(number, recorded.take(num_groups=1, step=number))

    for number in (1, 2, 3):
        step(number)
    asked, gate = tmp_path / "asked", tmp_path / "gate"
    waits = f"""
import pathlib, time
pathlib.Path({str(asked)!r}).touch()
while not pathlib.Path({str(gate)!r}).exists():
    time.sleep(0.01)
"""
    file.write_text(waits + HOOKED)
    with ThreadPoolExecutor(1) as thread:
        replay = {"source": recorded.run_id, "steps": "1-3", "code": "today"}
        starting = thread.submit(start_replay, server, replay)
        poll_until(asked.exists)
        for number in range(4, 8):
            step(number)
        collect(server)
        gate.touch()
        run = starting.result()
    until_ended(run)
    assert [each["reason"] for each in groups_of(run).values()] == ["", "", ""]
    collect(server)
    assert_error(server.client.post("/v1/runs", json={"replay": recorded.run_id}), 409, "bodies_gone")


def collect(server: ServerProcess) -> None:
    reply = server.client.post("/v1/gc", json={})
    assert reply.is_success, reply.text


def read_all_waiting(run: NativeRun) -> list[Json]:
    batches: list[Json] = []
    while True:
        reply = run.client.post(f"{run.path}/batches", json={"num_groups": 1, "wait_s": 20})
        if reply.status_code == 410:
            return batches
        if reply.json()["batch_id"] is not None:
            run.ack(reply.json())
            batches.append(reply.json())


def test_a_replay_of_nothing_is_refused_instead_of_ending_at_once(shared: ServerProcess) -> None:
    working = shared.start_run(group_size=SIZE)
    working.write(*make_group("g0", [0.0, 1.0, 0.5, 0.25]))
    refused = assert_error(
        shared.client.post("/v1/runs", json={"replay": working.run_id}), 404, "not_recorded", "replay.source"
    )
    assert "none of its groups has been read or has ended yet" in refused["message"]
    working.ack(working.take(num_groups=1))
    until_ended(start_replay(shared, working.run_id))
    empty = shared.start_run(group_size=SIZE)
    empty.stop()
    refused = assert_error(
        shared.client.post("/v1/runs", json={"replay": empty.run_id}), 404, "not_recorded", "replay.source"
    )
    assert "it has no group" in refused["message"]
