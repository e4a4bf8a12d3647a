"""Reading over HTTP: who gets what, who waits, and what becomes of the groups of a reader who goes away."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import MakeServer
from tests.kit import (
    TIME_LIMIT_S,
    NativeRun,
    ServerProcess,
    SlimeRun,
    assert_error,
    make_group,
    make_sample,
    poll_until,
)

GOOD = [0.0, 1.0, 0.0, 1.0]


def test_long_polls_do_not_hold_up_other_requests(run: NativeRun) -> None:
    with ThreadPoolExecutor(20) as pool:
        polls = [pool.submit(run.read, num_groups=1, wait_s=TIME_LIMIT_S) for _ in range(20)]
        for _ in range(10):
            assert run.client.get("/healthz").status_code == 200
            assert run.write(make_sample(instance_id="other"))[0]["status"] == 200
        assert not any(poll.done() for poll in polls), "they still wait, and nothing waited for them"
        for number in range(20):
            run.write(*make_group(number, GOOD))
        batches = [poll.result(TIME_LIMIT_S) for poll in polls]
    got = [batch["data"][0]["instance_id"] for batch in batches]
    assert set(got) - {"other"} <= set(range(20))
    assert len(set(got)) == 20


def test_a_waiting_reader_is_woken_by_the_sample_that_completes_its_batch(run: NativeRun) -> None:
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(run.read, batch_size=8, wait_s=TIME_LIMIT_S)
        run.write(*make_group("a", GOOD))
        run.write(*make_group("b", GOOD)[:3])
        assert not poll.done()
        run.write(make_group("b", GOOD)[3])
        assert len(poll.result(TIME_LIMIT_S)["data"]) == 8


def test_a_reader_that_disconnects_in_the_reply_gives_its_groups_back(slime: SlimeRun) -> None:
    for number in range(8):
        slime.write(*make_group(number, GOOD, padding="x" * 1_000_000))
    slime.write(*make_group("invalid", [0.5] * 4))
    body = json.dumps({"batch_size": 32}).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        reader.connect(("127.0.0.1", slime.server.port))
        reader.sendall(
            f"POST {slime.prefix}/get_rollout_data HTTP/1.1\r\nHost: localhost\r\n".encode()
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert reader.recv(1_000).startswith(b"HTTP/1.1 200 OK")
        assert {group["state"] for group in slime.groups()} == {"leased", "discarded"}
    poll_until(lambda: {group["state"] for group in slime.groups()} == {"ready", "discarded"})
    answer = slime.fetch(batch_size=32)["data"]
    assert [row["instance_id"] for row in answer["data"]] == [n for n in range(8) for _ in range(4)]
    assert answer["meta_info"]["finished_groups"] == [*range(8), "invalid"]
    assert answer["meta_info"]["total_samples"] == 36


def test_a_reader_that_disconnects_while_it_waits_takes_nothing(run: NativeRun) -> None:
    body = b'{"num_groups": 1, "wait_s": 60}'
    with socket.create_connection(("127.0.0.1", run.server.port)) as reader:
        request = f"POST {run.path}/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        reader.sendall(request.encode() + body)
        run.write(*make_group("a", GOOD)[:3])
    run.write(make_group("a", GOOD)[3])
    assert len(run.read(num_groups=1, wait_s=TIME_LIMIT_S)["data"]) == 4


def test_a_read_without_a_size_is_capped_by_groups_bytes_and_instance(server: ServerProcess) -> None:
    run = server.start_slime("capped", legacy_read_max_groups="2")
    for number in (1, 2, 3):
        run.write(*make_group(number, GOOD))
    assert [row["instance_id"] for row in run.fetch()["data"]["data"]] == [1] * 4 + [2] * 4
    assert [row["instance_id"] for row in run.fetch()["data"]["data"]] == [3] * 4
    run = server.start_slime("capped", legacy_read_max_bytes=5_000)
    for number in (1, 2, 3):
        run.write(*make_group(number, GOOD, padding="x" * 700))
    assert [len(run.fetch()["data"]["data"]) for _ in range(4)] == [4, 4, 4, 0]
    run = server.start_slime("capped")
    for epoch in (0, 1):
        for instance in ("a", "b"):
            run.write(*[s | {"uid": f"{s['uid']}/{epoch}"} for s in make_group(instance, GOOD)])
    for _ in range(2):
        assert [row["instance_id"] for row in run.fetch()["data"]["data"]] == ["a"] * 4 + ["b"] * 4
    run.stop()


def test_rows_beyond_a_batch_size_come_as_whole_groups_oldest_first(slime: SlimeRun) -> None:
    for number in range(4):
        slime.write(*make_group(number, GOOD))
    assert [row["instance_id"] for row in slime.fetch(batch_size="5")["data"]["data"]] == [0] * 4 + [1] * 4


def test_an_unsuccessful_reply_consumes_nothing(slime: SlimeRun) -> None:
    slime.write(*make_group("bad", [0.5] * 4))
    for _ in range(2):
        empty = slime.fetch()
        assert (empty["success"], empty["data"]["meta_info"]["finished_groups"]) == (False, [])
        assert empty["data"]["meta_info"]["total_samples"] == 4
    slime.write(*make_group("good", GOOD))
    meta = slime.fetch()["data"]["meta_info"]
    assert meta == {
        "total_samples": 8,
        "num_groups": 2,
        "avg_group_size": 4.0,
        "avg_reward": 0.5,
        "reward_std": pytest.approx(0.3779644730092272, abs=1e-12),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "finished_groups": ["good", "bad"],
    }
    slime.write(*make_group("next", GOOD))
    assert slime.fetch()["data"]["meta_info"]["finished_groups"] == ["next"]


# --- back-pressure


def test_new_groups_are_refused_at_the_limit_and_open_ones_filled(server: ServerProcess) -> None:
    run = server.start_run(max_buffer_size=4)
    run.write(*make_group("a", GOOD), *make_group("b", GOOD)[:0])
    answer = run.client.post(f"{run.path}/samples", json=make_sample(instance_id="new"))
    assert_error(answer, 429, "buffer_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert [group["instance_id"] for group in run.groups()] == ["a"]
    assert len(run.take(num_groups=1)["data"]) == 4
    run.write(*make_group("b", GOOD)[:3], *make_group("c", GOOD)[:1])
    assert run.client.post(f"{run.path}/samples", json=make_sample(instance_id="d")).status_code == 429
    assert run.write(make_group("b", GOOD)[3])[0]["outcome"] == "member"
    assert len(run.take(num_groups=1)["data"]) == 4
    run.stop()


def test_bytes_count_as_well(server: ServerProcess) -> None:
    run = server.start_run(max_buffer_bytes="2000", group_size=2)
    run.write(make_sample(instance_id="a", padding="x" * 2_000))
    answer = run.client.post(f"{run.path}/samples", json=make_sample(instance_id="b"))
    assert "max_buffer_bytes is 2000" in assert_error(answer, 429, "buffer_full")["message"]
    run.stop()


def test_in_an_array_each_sample_is_admitted_or_refused_by_itself(server: ServerProcess) -> None:
    run = server.start_run(max_buffer_size=3)
    group = make_group("open", GOOD)
    run.write(*group[:3])
    answer = run.client.post(f"{run.path}/samples", json=[make_sample(instance_id="new", uid="new"), group[3]])
    refused, admitted = answer.json()["results"]
    assert (refused["status"], refused["error"]["code"]) == (429, "buffer_full")
    assert (admitted["status"], admitted["outcome"]) == (200, "member")
    assert int(answer.headers["retry-after"]) >= 1
    assert len(run.take(num_groups=1)["data"]) == 4
    assert run.write(make_sample(instance_id="new", uid="new"))[0]["duplicate"] is False
    run.stop()


def test_slimes_write_waits_for_room_and_succeeds_after_a_read(server: ServerProcess) -> None:
    run = server.start_slime("full", max_buffer_size="4")
    run.write(*make_group("a", GOOD))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.send, make_sample(instance_id="b"))
        poll_until(lambda: run.client.get("/healthz").status_code == 200)
        assert not waiting.done()
        assert len(run.fetch()["data"]["data"]) == 4
        assert waiting.result(TIME_LIMIT_S).status_code == 200
    assert [group["state"] for group in run.groups()] == ["acked", "open"]
    run.stop()


def test_slimes_write_is_429_after_its_wait(make_server: MakeServer) -> None:
    server = make_server(write_wait_s=0.2)
    run = server.start_slime(max_buffer_size=1, group_size=1)
    run.send(make_sample(instance_id="a"))
    began_s = time.monotonic()
    answer = run.send(make_sample(instance_id="b"))
    assert_error(answer, 429, "buffer_full")
    assert time.monotonic() - began_s >= 0.2
    assert int(answer.headers["retry-after"]) >= 1
