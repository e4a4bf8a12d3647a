"""Over slime's routes names of ours mean something from our own writers only; ids may be numbers of any kind."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.client.sample_writer.writer import SampleWriter
from forebay.client.trainer.buffer_client import BufferClient
from forebay.core.ids import group_id
from forebay.core.sample import PLACE_HEADER, WRITER_HEADER
from forebay.engines.scripted import ScriptedEngine
from forebay.generators.base import BaseGenerator, single_turn
from tests.conftest import MakeServer
from tests.kit import (
    TIME_LIMIT_S,
    Json,
    ServerProcess,
    SlimeRun,
    assert_error,
    make_sample,
    poll_until,
    write_generator,
)

OURS = {WRITER_HEADER: "test"}
TELLING = """
import pathlib, threading
TASK_TYPE = "telling"
def run_rollout(data):
    pathlib.Path(data["tell"]).write_text(data["remote_buffer_url"])
    threading.Event().wait()
"""
FILTERING = """
import threading
TASK_TYPE = "filtering"
def run_rollout(data):
    threading.Event().wait()
def filter_item(item, task_type):
    return True
"""


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = tmp_path_factory.mktemp("tasks")
    write_generator(tasks, TELLING, "telling_generator.py")
    write_generator(tasks, FILTERING, "filtering_generator.py")
    return module_servers(generators=tasks)


@pytest.fixture(params=["root", "stream", "key"])
def route(request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path) -> tuple[SlimeRun, str]:
    """A run, and the path of its writes."""
    if request.param == "key":
        tell = tmp_path / "url"
        run = server.start_slime("keyed", "telling", group_size=2, tell=str(tell))
        return run, poll_until(lambda: tell.exists() and tell.read_text()).removeprefix(server.url) + "/buffer/write"
    run = server.start_slime("" if request.param == "root" else "streamed", group_size=2, nonce=str(tmp_path))
    return run, f"{run.prefix}/buffer/write"


def send(run: SlimeRun, path: str, body: Json | bytes, **headers: str) -> Json:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = run.client.post(path, content=content, headers=headers)
    assert reply.status_code == 200, reply.text
    told: Json = reply.json()
    return told


def test_a_writer_that_asks_is_told_where_its_sample_was_put(route: tuple[SlimeRun, str]) -> None:
    run, path = route
    places = [
        run.client.post(path, json=make_sample(uid=f"{path}-{n}", instance_id=path), headers=headers).headers
        for n, headers in ((0, {PLACE_HEADER: "1"}), (1, {}), (2, {PLACE_HEADER: "1"}), (2, {PLACE_HEADER: "1"}))
    ]
    assert [each.get(PLACE_HEADER) for each in places] == [
        f"{group_id(path, 0)} 0 0",
        None,
        f"{group_id(path, 1)} 1 0",
        None,
    ]


STRANGE: list[Json] = [
    {"rollout_id": "batch-7"},
    {"rollout_id": 1, "fork": 1, "epoch": 3, "slot": 0},
    {"epoch": "third", "slot": "left", "fork": "tine"},
    {"epoch": 1.5, "slot": -1, "fork": {}, "rollout_id": ["x"]},
    {"outcome": "agent_failure"},
    {"outcome": "cancelled", "rollout_id": "r", "fork": 2, "epoch": 0, "slot": 0},
    {"outcome": {"won": True}},
]


@pytest.mark.parametrize("fields", STRANGE, ids=json.dumps)
def test_what_others_call_by_our_names_travels_untouched(route: tuple[SlimeRun, str], fields: Json) -> None:
    run, path = route
    bodies = [json.dumps(make_sample(uid=f"{fields}{n}", reward=float(n), **fields)).encode() for n in range(2)]
    told = [send(run, path, body) for body in bodies]
    assert [answer["data"]["data"] for answer in told] == [[json.loads(body)] for body in bodies]
    rows = run.fetch()["data"]["data"]
    assert sorted(row["reward"] for row in rows) == pytest.approx([-1, 1], abs=1e-6), (
        "both are main samples of one group"
    )
    assert all(row[name] == value for row in rows for name, value in fields.items())
    group = run.groups()[-1]
    assert (group["epoch"], group["num_samples"], group["num_forks"], group["num_failed"]) == (0, 2, 0, 0)


def test_equal_rollout_ids_leave_advantages_where_a_users_hook_sees_the_items(server: ServerProcess) -> None:
    run = server.start_slime("filtered", "filtering", group_size=2)
    for n in range(2):
        run.send(make_sample(uid=n, reward=float(n), rollout_id="same", fork=n))
    rows = run.fetch()["data"]["data"]
    assert sorted(row["reward"] for row in rows) == pytest.approx([-1, 1], abs=1e-6)
    assert [(row["uid"], row["rollout_id"], row["fork"]) for row in rows] == [(0, "same", 0), (1, "same", 1)]


def test_a_writer_of_ours_means_what_the_native_api_says(route: tuple[SlimeRun, str]) -> None:
    run, path = route
    place = {"instance_id": "ours", "epoch": 4, "slot": 1, "rollout_id": "r1"}
    send(run, path, make_sample(uid="fork", fork=1, reward=1.0, **place), **OURS)
    send(run, path, make_sample(uid="main", reward=1.0, **place), **OURS)
    (group,) = (group for group in run.groups() if group["instance_id"] == "ours")
    assert (group["epoch"], group["num_samples"], group["num_forks"]) == (4, 1, 1)
    samples = run.group(group["group_id"])["samples"]
    assert [(sample["uid"], sample["slot"], sample["fork"]) for sample in samples] == [("fork", 1, 1), ("main", 1, 0)]
    send(run, path, make_sample(uid="failed", outcome="judge_failure", **{**place, "slot": 0}), **OURS)
    assert run.group(group["group_id"])["num_failed"] == 1
    reply = run.client.post(path, json=make_sample(slot="left"), headers=OURS)
    assert_error(reply, 422, "invalid_input", "slot")


def test_native_readers_are_told_which_rows_are_of_others(server: ServerProcess) -> None:
    run = server.start_slime("read-natively", group_size=2)
    for n in range(2):
        run.send(make_sample(uid=f"theirs{n}", instance_id="theirs", reward=float(n), rollout_id="same"))
    with SampleWriter(server.url, run.run_id) as writer:
        for n in range(2):
            writer.write(make_sample(uid=f"ours{n}", instance_id="ours", reward=float(n), rollout_id=f"r{n}"))
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=2)
        assert batch is not None
        assert [batch.rows[at]["uid"] for at in sorted(batch.foreign_rows)] == ["theirs0", "theirs1"]
        client.release(batch)


def test_they_stay_theirs_when_the_server_is_killed(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_slime(group_size=2)
    for n in range(2):
        run.send(make_sample(uid=f"u{n}", reward=float(n), rollout_id="same", fork=1))
    server.kill9()
    server.restart()
    batch = run.read(num_groups=1)
    assert batch["foreign_rows"] == [0, 1]
    assert sorted(row["reward"] for row in batch["data"]) == pytest.approx([-1, 1], abs=1e-6)


async def test_the_base_generator_is_a_writer_of_ours_over_these_routes_too(
    server: ServerProcess, tmp_path: Path
) -> None:
    run = server.start_slime("base-elsewhere", group_size=2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instance_id": "a", "prompt": "q"}\n')

    async def reward(item: Json) -> float:
        return 1.0

    async with ScriptedEngine(lambda _: "x") as engine:
        generator = BaseGenerator(engine.url, f"{server.url}{run.prefix}", num_repeat_per_sample=2)
        await generator.run_async(rows, single_turn, reward, num_epoch=2)
    groups = [run.group(group["group_id"]) for group in run.groups()]
    assert sorted(group["epoch"] for group in groups) == [0, 1]  # both are under way at once
    assert [sorted(sample["slot"] for sample in group["samples"]) for group in groups] == [[0, 1], [0, 1]]
    assert not any(sample["is_foreign"] for group in groups for sample in group["samples"])


# --- ids

UIDS = [("7", "7"), ('"7"', "7"), ("7.0", "7"), ("7e0", "7"), ("-0.0", "0"), ("1e3", "1000"), ("7.50", "7.5")]
UIDS += [("9" * 60, "9" * 60), ('"7.0"', "7.0")]
INSTANCES: list[tuple[str, Any]] = [("1", 1), ("1.0", 1), ('"1"', "1"), ("1.5", "1.5"), ("-0.0", 0), ("1e3", 1_000)]
INSTANCES += [("1e22", 10**22), ('"1.0"', "1.0"), ("9" * 60, int("9" * 60)), ("2.50e-1", "0.25"), ('"1.5"', "1.5")]


@pytest.mark.parametrize(("sent", "text"), UIDS)
def test_a_uid_counts_as_its_text(route: tuple[SlimeRun, str], sent: str, text: str) -> None:
    run, path = route
    body = json.dumps(make_sample(uid="UID", instance_id=f"uid {sent}")).replace('"UID"', sent).encode()
    assert send(run, path, body)["duplicate"] is False
    assert send(run, path, make_sample(uid=text, instance_id=f"uid {sent}"))["duplicate"] is True
    (group,) = (group for group in run.groups() if group["instance_id"] == f"uid {sent}")
    (sample,) = run.client.get(f"{run.path}/groups/{group['group_id']}", params={"bodies": True}).json()["samples"]
    assert sample["uid"] == text
    assert json.dumps(sample["body"]["uid"]) == json.dumps(json.loads(sent)), "the body is as it was sent"
    run.client.post(f"{run.path}/stop")


@pytest.mark.parametrize(("sent", "instance_id"), INSTANCES)
def test_an_instance_id_keeps_its_type_unless_it_is_a_float(server: ServerProcess, sent: str, instance_id: Any) -> None:
    run = server.start_slime(f"ids-{abs(hash(sent))}", group_size=2)
    for n in range(2):
        body = json.dumps(make_sample(instance_id="ID", reward=float(n))).replace('"ID"', sent)
        send(run, f"{run.prefix}/buffer/write", body.encode())
    data = run.fetch()["data"]
    assert [json.dumps(row["instance_id"]) for row in data["data"]] == [json.dumps(json.loads(sent))] * 2
    (finished,) = data["meta_info"]["finished_groups"]
    assert (type(finished), finished) == (type(instance_id), instance_id)


NO_IDS = [(field, sent) for field in ("uid", "instance_id") for sent in ("true", "null", "[7]", "NaN", "1e400")]


@pytest.mark.parametrize(("field", "sent"), [*NO_IDS, ("uid", "9" * 1_100)])
def test_what_is_no_id_is_refused(server: ServerProcess, field: str, sent: str) -> None:
    run = server.start_slime("refusing", group_size=2)
    body = json.dumps(make_sample(**{field: "ID"})).replace('"ID"', sent)
    reply = run.client.post(f"{run.prefix}/buffer/write", content=body)
    assert_error(reply, 422, "invalid_input", "body" if sent == "NaN" else field)


def test_one_instance_is_the_same_as_whole_number_and_float(server: ServerProcess) -> None:
    run = server.start_slime("mixed", group_size=2)
    run.send(make_sample(instance_id=3, reward=0.0))
    run.send(make_sample(instance_id=3.0, reward=1.0))
    assert run.fetch()["data"]["meta_info"]["finished_groups"] == [3]


def test_a_start_skips_ids_by_the_same_reading(server: ServerProcess) -> None:
    run = server.start_slime("skipping", skip_instance_ids=[1.0, 1.5, 2, "3", "3.0"])
    assert run.client.get(f"{run.path}/skip_instance_ids").json()["skip_instance_ids"] == [1, "1.5", 2, "3", "3.0"]
    start = {"task_type": "idle", "num_repeat_per_sample": 4}
    for wrong in ("[true]", "[NaN]", "[Infinity]", "[null]"):
        body = json.dumps({**start, "skip_instance_ids": "LIST"}).replace('"LIST"', wrong)
        reply = httpx.post(f"{server.url}/s/other/start_rollout", content=body, timeout=TIME_LIMIT_S)
        assert_error(reply, 422, "invalid_input", "skip_instance_ids")
