"""Leases over HTTP: acknowledging, giving back and extending them, losing them, and asking twice."""

import json
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.kit import TIME_LIMIT_S, Json, NativeRun, ServerProcess, assert_error, make_group, poll_until

GOOD = [0.0, 1.0]
NUM_GROUPS = 5_000
NUM_READERS = 8
RUN = {"group_size": 2}


def fill(run: NativeRun, *instance_ids: str | int) -> None:
    run.write(*[sample for instance_id in instance_ids for sample in make_group(instance_id, GOOD)])


def instances(batch: Json) -> list[str | int]:
    """The groups of a batch in order; each one's rows are adjacent."""
    ids = [row["instance_id"] for row in batch["data"]]
    assert ids[::2] == ids[1::2]
    return ids[::2]


def states(run: NativeRun) -> dict[str | int, str]:
    return {group["instance_id"]: group["state"] for group in run.groups()}


def post(run: NativeRun, path: str, **body: Any) -> httpx.Response:
    return run.client.post(f"{run.path}/{path}", json=body)


def test_a_batch_is_the_readers_until_it_is_acknowledged(run: NativeRun) -> None:
    fill(run, 1, 2, 3)
    batch = run.read(num_groups=2, step=7, lease_s=30)
    assert (instances(batch), batch["num_groups"], batch["lease_s"]) == ([1, 2], 2, 30.0)
    assert states(run) == {1: "leased", 2: "leased", 3: "ready"}
    [listed] = run.batches(state="leased")
    assert listed.pop("leased_at_s") > 1_000_000_000
    assert listed == {
        "batch_id": batch["batch_id"],
        "state": "leased",
        "step": 7,
        "checkpoint_step": None,
        "request_id": None,
        "num_groups": 2,
        "num_rows": 4,
        "lease_s": 30.0,
    }
    for _ in range(2):
        assert run.ack(batch) == {"batch_id": batch["batch_id"], "state": "acked"}
    assert states(run) == {1: "acked", 2: "acked", 3: "ready"}
    assert run.batches(state="leased") == []
    assert [each["state"] for each in run.batches()] == ["acked"]


def test_a_batch_given_back_is_ready_in_its_old_place(run: NativeRun) -> None:
    fill(run, 1, 2)
    first = run.read(num_groups=1)
    for _ in range(2):
        assert run.release(first) == {"batch_id": first["batch_id"], "state": "released"}
    second = run.take(num_groups=2)
    assert instances(second) == [1, 2]
    assert [group["num_deliveries"] for group in run.groups()] == [2, 1]
    assert_error(post(run, f"batches/{second['batch_id']}/release"), 409, "batch_acked")
    assert "released" in assert_error(post(run, f"batches/{first['batch_id']}/ack"), 409, "lease_lost")["message"]


def test_what_a_batch_told_of_is_told_again_when_it_comes_back(run: NativeRun) -> None:
    run.write(*make_group("bad", [0.5, 0.5]))
    fill(run, 1)
    told = run.read(num_groups=1)
    assert told["meta_info"]["finished_groups"] == [1, "bad"]
    run.release(told)
    assert run.take(num_groups=1)["meta_info"] == told["meta_info"]


def test_an_expired_lease_goes_to_the_next_reader_and_a_late_ack_is_told_who_has_it(run: NativeRun) -> None:
    fill(run, 1, 2)
    late = run.read(num_groups=1, lease_s=0.05)
    poll_until(lambda: states(run)[1] == "ready")
    assert [batch["state"] for batch in run.batches()] == ["expired"]
    second = run.read(num_groups=2, step=12)
    assert instances(second) == [1, 2]
    for call in ("ack", "extend"):
        told = assert_error(post(run, f"batches/{late['batch_id']}/{call}"), 409, "lease_lost")["message"]
        assert second["batch_id"] in told
        assert "step 12" in told
    run.ack(second)
    assert states(run) == {1: "acked", 2: "acked"}


def test_an_expired_lease_whose_groups_are_there_is_acknowledged_or_begins_anew(run: NativeRun) -> None:
    fill(run, 1, 2)
    first, second = run.read(num_groups=1), run.read(num_groups=1)
    for batch in (first, second):  # a short lease of the first would end before the second is read
        run.extend(batch, lease_s=0.05)
    poll_until(lambda: set(states(run).values()) == {"ready"})
    run.ack(first)
    told = run.extend(second, lease_s=60)
    assert told == {"batch_id": second["batch_id"], "state": "leased", "lease_s": 60.0}
    assert states(run) == {1: "acked", 2: "leased"}
    assert run.read(num_groups=1)["batch_id"] is None
    assert run.ack(second)["state"] == "acked"
    assert_error(post(run, f"batches/{second['batch_id']}/extend"), 409, "batch_acked")


def test_a_discarded_group_of_an_expired_lease_is_named(run: NativeRun) -> None:
    run.write(*make_group(1, GOOD, weight_version=0))
    late = run.read(num_groups=1, lease_s=0.05)
    poll_until(lambda: states(run)[1] == "ready")
    run.client.put(f"{run.path}/weight_version", json={"weight_version": 5})
    assert run.read(num_groups=1, max_staleness=2)["batch_id"] is None
    assert (
        "discarded: stale" in assert_error(post(run, f"batches/{late['batch_id']}/ack"), 409, "lease_lost")["message"]
    )


def test_an_extended_lease_outlives_its_first_end(run: NativeRun) -> None:
    fill(run, 1, 2)
    kept, other = run.read(num_groups=1, lease_s=5), run.read(num_groups=1, lease_s=5)
    run.extend(kept, lease_s=60)
    poll_until(lambda: states(run)[2] == "ready")
    assert states(run)[1] == "leased"
    assert {batch["batch_id"]: batch["state"] for batch in run.batches()} == {
        kept["batch_id"]: "leased",
        other["batch_id"]: "expired",
    }


# --- asking twice


def test_a_repeated_request_gets_the_same_batch(run: NativeRun) -> None:
    run.write(*make_group("bad", [0.5, 0.5]))
    fill(run, 1, 2, 3)
    asked = {"num_groups": 2, "request_id": "step-1", "lease_s": 50}
    first = run.read(**asked)
    assert run.read(**asked) == first
    assert run.read(num_groups=1) | {"data": 0} != first | {"data": 0}
    run.ack(first)
    assert_error(post(run, "batches", **asked), 409, "batch_acked")


def test_a_repeated_request_whose_batch_is_gone_gets_a_fresh_one(run: NativeRun) -> None:
    fill(run, 1)
    first = run.read(num_groups=1, request_id="a")
    run.release(first)
    second = run.read(num_groups=1, request_id="a", lease_s=0.05)
    poll_until(lambda: states(run)[1] == "ready")
    third = run.read(num_groups=1, request_id="a")
    run.rewind(None)
    fourth = run.read(num_groups=1, request_id="a")
    assert len({batch["batch_id"] for batch in (first, second, third, fourth)}) == 4
    assert {instances(batch)[0] for batch in (first, second, third, fourth)} == {1}
    assert run.ack(fourth)["state"] == "acked"


def test_one_request_sent_over_two_connections_at_once_is_one_batch(run: NativeRun) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = {"num_groups": 1, "request_id": "same", "wait_s": TIME_LIMIT_S}
        polls = [pool.submit(run.read, **asked) for _ in range(2)]
        fill(run, 1, 2)
        first, second = (poll.result(TIME_LIMIT_S) for poll in polls)
    assert first == second
    assert states(run) == {1: "leased", 2: "ready"}


def test_a_reader_that_goes_away_in_the_reply_gives_its_batch_back(run: NativeRun) -> None:
    for number in range(4):
        run.write(*make_group(number, GOOD, padding="x" * 3_000_000))
    with _half_read(run, num_groups=4):
        assert set(states(run).values()) == {"leased"}
    poll_until(lambda: set(states(run).values()) == {"ready"})
    assert [batch["state"] for batch in run.batches()] == ["released"]


def test_it_stays_with_the_reader_who_asked_again_meanwhile(run: NativeRun) -> None:
    for number in range(4):
        run.write(*make_group(number, GOOD, padding="x" * 3_000_000))
    with _half_read(run, num_groups=4, request_id="again"):
        batch = run.read(num_groups=4, request_id="again")
    run.write(*make_group("more", GOOD))
    assert instances(run.read(num_groups=1, wait_s=TIME_LIMIT_S)) == ["more"]
    assert run.ack(batch)["state"] == "acked"


def _half_read(run: NativeRun, **body: Any) -> socket.socket:
    """A client that has sent its request, and reads no more than the beginning of the reply."""
    content = json.dumps(body).encode()
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    reader.connect(("127.0.0.1", run.server.port))
    head = f"POST {run.path}/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    reader.sendall(head.encode() + content)
    assert reader.recv(1_000).startswith(b"HTTP/1.1 200 OK")
    return reader


# --- many readers


def test_eight_readers_get_five_thousand_groups_each_once_and_whole(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    samples = [sample for number in range(NUM_GROUPS) for sample in make_group(number, GOOD)]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        readers = [pool.submit(_read_all, run) for _ in range(NUM_READERS)]
        for at in range(0, len(samples), 1_001):  # an odd number: groups are cut in two
            run.write(*samples[at : at + 1_001])
        run.stop()
        got = [reader.result(4 * TIME_LIMIT_S) for reader in readers]
    assert sorted(number for own in got for number in own) == list(range(NUM_GROUPS))
    assert all(got), "every reader had its share"
    assert Counter(run.view()["groups"]) == {"acked": NUM_GROUPS, "open": 0, "ready": 0, "leased": 0, "discarded": 0}
    run.stop()


def _read_all(run: NativeRun) -> list[str | int]:
    got: list[str | int] = []
    with httpx.Client(base_url=run.server.url, timeout=TIME_LIMIT_S) as client:
        while (reply := client.post(f"{run.path}/batches", json={"num_groups": 20, "wait_s": 2})).status_code != 410:
            if not (batch := reply.json())["data"]:
                continue
            got += instances(batch)
            assert client.post(f"{run.path}/batches/{batch['batch_id']}/ack").status_code == 200
    return got


# --- wrong input


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("batches", {"num_groups": 1, "lease_s": 0}, "lease_s"),
        ("batches", {"num_groups": 1, "step": -1}, "step"),
        ("batches", {"num_groups": 1, "step": 1 << 60}, "step"),
        ("batches", {"num_groups": 1, "lease_s": True}, "lease_s"),
        ("batches", {"num_groups": 1, "max_staleness": -1}, "max_staleness"),
        ("batches", {"num_groups": 1, "request_id": "x" * 201}, "request_id"),
        ("batches", {"num_groups": 1, "request_id": 5}, "request_id"),
        ("batches/b/extend", {"lease_s": -1}, "lease_s"),
        ("checkpoints", {}, "step"),
        ("checkpoints", {"step": -1}, "step"),
        ("checkpoints", {"step": True}, "step"),
        ("checkpoints", {"step": 1, "batch_ids": "b"}, "batch_ids"),
        ("rewind", {}, "step"),
        ("rewind", {"step": "x"}, "step"),
        ("rewind", {"step": False}, "step"),
        ("rewind", {"step": 1, "steps": 2}, "steps"),
    ],
)
def test_a_wrong_field_is_named(run: NativeRun, path: str, body: Json, field: str) -> None:
    assert_error(run.client.post(f"{run.path}/{path}", json=body), 422, "invalid_input", field)


@pytest.mark.parametrize("call", ["ack", "release", "extend"])
def test_a_batch_that_never_was_is_a_404(run: NativeRun, call: str) -> None:
    assert_error(post(run, f"batches/batch-000001-none/{call}"), 404, "batch_not_found")
    assert_error(run.client.post(f"/v1/runs/run-none/batches/b/{call}"), 404, "run_not_found")


def test_a_weight_version_is_a_number_from_zero(run: NativeRun) -> None:
    for body in ({"weight_version": -1}, {}, {"weight_version": "new"}, {"weight_version": True}):
        answer = run.client.put(f"{run.path}/weight_version", json=body)
        assert_error(answer, 422, "invalid_input", "weight_version")
    for version in (3, 1):
        answer = run.client.put(f"{run.path}/weight_version", json={"weight_version": version})
        assert answer.json() == {"weight_version": version} == {"weight_version": run.view()["weight_version"]}
