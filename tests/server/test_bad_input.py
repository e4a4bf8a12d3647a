"""What bad input gets, over HTTP, against a real server. Too large a body and a wrong token are in test_access.py,
bad starts in test_bad_starts.py, hooks that misbehave in test_bad_hooks.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.core.sample import WRITER_HEADER
from tests.conftest import MakeServer
from tests.kit import (
    NativeRun,
    ServerProcess,
    SlimeRun,
    assert_error,
    make_group,
    make_sample,
    poll_until,
)

GOOD = [0.0, 1.0, 0.0, 1.0]


def read_one(run: NativeRun, **query: Any) -> list[str]:
    """The instance of each row of the next group."""
    return [row["instance_id"] for row in run.read(num_groups=1, **query)["data"]]


# --- malformed bodies

MALFORMED = [
    pytest.param(b'{"uid": "a"', "body", id="cut off"),
    pytest.param(b"", "body", id="empty"),
    pytest.param(b"\xff\xfe{}", "body", id="not UTF-8"),
    pytest.param(b'"text"', "body", id="a string"),
    pytest.param(b"null", "body", id="null"),
    pytest.param(json.dumps(make_sample(uid=...)).encode(), "uid", id="no uid"),
    pytest.param(json.dumps(make_sample(uid="")).encode(), "uid", id="empty uid"),
    pytest.param(json.dumps(make_sample(uid=True)).encode(), "uid", id="uid is a bool"),
    pytest.param(json.dumps(make_sample(uid="x" * 1_025)).encode(), "uid", id="uid too long"),
    pytest.param(json.dumps(make_sample(instance_id=...)).encode(), "instance_id", id="no instance_id"),
    pytest.param(json.dumps(make_sample(instance_id=True)).encode(), "instance_id", id="instance_id is a bool"),
    pytest.param(
        json.dumps(make_sample()).encode().replace(b'"task-1"', b"1e400"), "instance_id", id="instance_id is infinite"
    ),
    pytest.param(json.dumps(make_sample(instance_id=[1])).encode(), "instance_id", id="instance_id is a list"),
    pytest.param(json.dumps(make_sample(messages=...)).encode(), "messages", id="no messages"),
    pytest.param(json.dumps(make_sample(messages="hi")).encode(), "messages", id="messages is a string"),
    pytest.param(json.dumps(make_sample(messages=None)).encode(), "messages", id="messages is null"),
    pytest.param(json.dumps(make_sample(messages={"0": 1})).encode(), "messages", id="messages is an object"),
    pytest.param(json.dumps(make_sample(epoch=-1)).encode(), "epoch", id="epoch is negative"),
    pytest.param(json.dumps(make_sample(slot="0")).encode(), "slot", id="slot is a string"),
    pytest.param(json.dumps(make_sample(reward=float("nan"))).encode(), "body", id="NaN"),
    pytest.param(json.dumps(make_sample(extra=float("inf"))).encode(), "body", id="Infinity in another field"),
    pytest.param(json.dumps(make_sample()).encode() + b"x", "body", id="text behind it"),
]


@pytest.fixture(scope="module")
def empty_run(server: ServerProcess) -> Iterator[SlimeRun]:
    """A run that nothing gets into."""
    run = server.start_slime("malformed")
    yield run
    run.stop()


@pytest.mark.parametrize(("body", "field"), MALFORMED)
def test_a_malformed_sample_is_told_by_field_and_stores_nothing(empty_run: SlimeRun, body: bytes, field: str) -> None:
    for path in (f"{empty_run.path}/samples", f"{empty_run.prefix}/buffer/write"):
        reply = empty_run.client.post(path, content=body, headers={WRITER_HEADER: "test"})
        assert_error(reply, 422, "invalid_input", field)
    assert empty_run.groups() == []
    samples = empty_run.view()["samples"]
    assert {count for name, count in samples.items()} == {0}


def test_reads_go_on_after_malformed_samples(run: NativeRun) -> None:
    for case in MALFORMED:
        run.client.post(f"{run.path}/samples", content=case.values[0])
    run.write(*make_group("ok", GOOD))
    assert read_one(run) == ["ok"] * 4


def test_each_item_of_an_array_gets_its_own_verdict(run: NativeRun) -> None:
    good, bad = make_sample(uid="good"), make_sample(messages="no")
    verdicts = run.write(bad, good, {}, make_sample(uid="other"))
    assert [verdict["status"] for verdict in verdicts] == [422, 200, 422, 200]
    assert [verdicts[n]["error"]["field"] for n in (0, 2)] == ["messages", "uid"]
    assert run.view()["samples"]["buffered"] == 2


def test_an_array_that_is_not_json_is_refused_as_a_whole(run: NativeRun) -> None:
    body = b"[" + json.dumps(make_sample()).encode() + b", {]"
    assert_error(run.client.post(f"{run.path}/samples", content=body), 422, "invalid_input", "body")
    assert run.groups() == []


@pytest.mark.parametrize("content", [None, [], {"deep": [1]}, 7])
def test_message_contents_of_any_shape_do_not_harm_reads(run: NativeRun, content: object) -> None:
    run.write(*make_group("odd", GOOD, messages=[{"role": "assistant", "content": content}]))
    batch = run.read(num_groups=1)
    assert [row["messages"][0]["content"] for row in batch["data"]] == [content] * 4


# --- rewards that nobody can train on

UNUSABLE = [
    pytest.param(json.dumps(make_sample(uid="r", reward=reward)), id=told)
    for reward, told in [(..., "missing"), (None, "null"), ("1.0", "a string"), ([1], "a list")]
] + [pytest.param(json.dumps(make_sample(uid="r", reward=0)).replace('"reward": 0', '"reward": 1e999'), id="too large")]


@pytest.mark.parametrize("body", UNUSABLE)
def test_an_unusable_reward_is_refused_by_the_native_route(empty_run: SlimeRun, body: str) -> None:
    run = empty_run
    error = assert_error(run.client.post(f"{run.path}/samples", content=body), 422, "invalid_input", "reward")
    assert '"status": "failed"' in error["hint"]
    [verdict] = run.client.post(f"{run.path}/samples", content=f"[{body}]").json()["results"]
    assert (verdict["status"], verdict["error"]["field"]) == (422, "reward")
    assert run.groups() == []


def test_unusable_rewards_are_stored_as_failed_and_counted_by_slimes_route(server: ServerProcess) -> None:
    run = server.start_slime("unusable", group_size=len(UNUSABLE))
    for number, case in enumerate(UNUSABLE):
        body = case.values[0].replace('"uid": "r"', f'"uid": "r{number}"')
        assert run.client.post(f"{run.prefix}/buffer/write", content=body).status_code == 200
        assert run.view()["samples"]["failed"] == number + 1
    [group] = run.groups()
    samples = run.group(group["group_id"])["samples"]
    assert {(s["status"], s["reward"], s["error"]) for s in samples} == {("failed", None, "invalid_reward")}
    assert run.fetch()["success"] is False
    assert run.view()["discarded"] == {"failed": 1}
    run.stop()


def test_reward_beyond_float64_fills_its_slot_and_the_rest_of_the_group_goes_out(server: ServerProcess) -> None:
    run = server.start_slime("beyond", group_size=4)
    for sample in make_group("g", [0.0, 1.0, 1.0]):
        run.send(sample)
    huge = json.dumps(make_sample(instance_id="g", reward=0)).replace('"reward": 0', '"reward": ' + "9" * 400)
    assert run.client.post(f"{run.prefix}/buffer/write", content=huge).status_code == 200
    rows = run.fetch()["data"]["data"]
    assert len(rows) == 4
    assert {row["uid"] for row in rows} == {"g/0", "g/1", "g/2"}
    run.stop()


# --- the same uid again


def test_the_same_uid_again_is_acknowledged_and_counted_once(run: NativeRun) -> None:
    sample = make_sample(uid="same")
    first, twin = run.write(sample, sample)
    assert (first["duplicate"], twin["duplicate"]) == (False, True)
    [again] = run.write(sample | {"reward": 0.5})
    assert again == {"status": 200, "uid": "same", "duplicate": True}
    [group] = run.groups()
    assert group["num_samples"] == 1
    assert run.group(group["group_id"])["samples"][0]["reward"] == 1.0


def test_the_same_uid_again_is_known_after_a_kill_and_over_both_routes(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_slime(group_size=2)
    sample = make_sample(uid="same")
    assert run.send(sample).json()["duplicate"] is False
    server.kill9()
    server.restart()
    answer = run.send(sample)
    assert (answer.status_code, answer.json()["duplicate"]) == (200, True)
    [verdict] = run.write(sample)
    assert verdict["duplicate"] is True
    [group] = run.groups()
    assert group["num_samples"] == 1


def test_the_same_uid_in_another_run_is_another_sample(server: ServerProcess, run: NativeRun) -> None:
    other = server.start_run()
    sample = make_sample(uid="shared")
    assert [v["duplicate"] for v in (*run.write(sample), *other.write(sample))] == [False, False]
    other.stop()


# --- unknown and ended runs


@pytest.mark.parametrize(
    "path", ["/v1/runs/run-000000000000/samples", "/w/no-such-key/samples", "/w/no-such-key/buffer/write"]
)
def test_a_sample_for_an_unknown_run_or_key_is_404(server: ServerProcess, path: str) -> None:
    error = assert_error(server.client.post(path, json=make_sample()), 404, "run_not_found")
    assert "no-such-key" not in error["message"]


def test_a_write_to_a_name_without_a_run_is_404(server: ServerProcess) -> None:
    assert_error(server.client.post("/s/nobody/buffer/write", json=make_sample()), 404, "run_not_found")


def test_a_sample_for_an_ended_run_is_stored_as_late(server: ServerProcess) -> None:
    run = server.start_run()
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    [verdict] = run.write(make_sample(uid="too-late"))
    assert (verdict["status"], verdict["outcome"]) == (200, "late")
    assert run.view()["samples"]["late"] == 1
    assert run.groups() == []


# --- reads


def test_a_batch_size_too_large_takes_nothing(server: ServerProcess) -> None:
    run = server.start_slime("large", group_size=4)
    for sample in make_group("g", GOOD):
        run.send(sample)
    for batch_size in (100, 10**400):
        answer = run.fetch(batch_size=batch_size)
        assert answer["success"] is False
        assert answer["data"]["data"] == []
    assert run.read(num_groups=2) | {"meta_info": 0} == {"batch_id": None, "data": [], "meta_info": 0}
    assert run.read(batch_size=5)["batch_id"] is None
    assert len(run.fetch(batch_size=4)["data"]["data"]) == 4
    run.stop()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/get_rollout_data", {"batch_size": 0}, "batch_size"),
        ("/get_rollout_data", {"batch_size": "many"}, "batch_size"),
        ("/buffer/read", {"batch_size": 1, "timeout": -1}, "timeout"),
        ("batches", {"num_groups": 1, "batch_size": 1}, "body"),
        ("batches", {}, "body"),
        ("batches", {"num_groups": 1.5}, "num_groups"),
        ("batches", {"num_groups": 10**400}, "num_groups"),
        ("batches", {"num_groups": True}, "num_groups"),
        ("batches", {"num_groups": 1, "wait_s": True}, "wait_s"),
        ("batches", {"num_groups": 1, "wait": 3}, "wait"),
    ],
)
def test_a_malformed_read_is_422(server: ServerProcess, run: NativeRun, path: str, body: Any, field: str) -> None:
    url = f"{run.path}/batches" if path == "batches" else server.start_slime("reads").prefix + path
    assert_error(server.client.post(url, json=body), 422, "invalid_input", field)


# --- the disk


def fill(disk: Path) -> Path:
    """Take what room there is."""
    path = disk / "ballast"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            while True:
                try:
                    file.write(bytes(size))
                except OSError:
                    break
    return path


def test_a_full_disk_is_507_and_writing_resumes_by_itself(small_disk: Path, make_server: MakeServer) -> None:
    server = make_server(data_dir=small_disk / "data", segment_bytes=1 << 16)
    run = server.start_slime(group_size=4)
    for sample in make_group("before", GOOD):
        assert run.send(sample).status_code == 200
    ballast = fill(small_disk)
    refused = [s | {"padding": "x" * 20_000} for s in make_group("refused", GOOD)]
    for sample in refused:
        assert_error(run.send(sample), 507, "storage_failed")
    assert_error(run.client.post(f"{run.path}/samples", json=refused[0]), 507, "storage_failed")
    starts = run.client.post("/v1/runs", json={"task_type": "idle", "group_size": 4})
    assert_error(starts, 507, "storage_failed")
    assert [path.name for path in (small_disk / "data" / "runs").iterdir()] == [run.run_id], "nothing is left of it"
    # What is stored is delivered all the same: acknowledgements have a reserve.
    delivered = poll_until(lambda: run.fetch()["data"]["data"])
    assert [row["instance_id"] for row in delivered] == ["before"] * 4
    assert run.client.get("/readyz").status_code == 503
    assert run.client.get("/healthz").status_code == 200
    ballast.unlink()
    poll_until(lambda: run.client.get("/readyz").status_code == 200)
    assert [g["instance_id"] for g in run.groups()] == ["before"]
    answers = [run.send(sample) for sample in refused]
    assert [answer.json()["duplicate"] for answer in answers] == [False] * 4
    rows = run.fetch(batch_size=4)["data"]["data"]
    assert [r["instance_id"] for r in rows] == ["refused"] * 4


def test_no_client_mistake_is_a_5xx(server: ServerProcess, run: NativeRun) -> None:
    bodies = [b"", b"[]", b"0", b"{}", b'{"num_groups": 1e400}', b"\x00", b"[" * 100_000, b'{"a":' * 100_000]
    paths = [f"{run.path}/{route}" for route in ("samples", "batches", "stop")]
    paths += ["/start_rollout", "/buffer/write", "/get_rollout_data", "/buffer/read", "/v1/runs", "/w/key/progress"]
    answers: dict[tuple[str, bytes], httpx.Response] = {}
    for path in paths:
        for body in bodies:
            answers[path, body[:20]] = server.client.post(path, content=body)
    assert {case: a.text for case, a in answers.items() if a.status_code >= 500} == {}
