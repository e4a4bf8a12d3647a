"""Batches that are read while they are sent: the same rows, and never a wrong byte."""

import json
import os
import re
from array import array
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from forebay.core.binary_sample import SAMPLES_TYPE, join_samples, pack
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_sample, poll_until

NUM_GROUPS = 20
TEXT = "0123456789abcdef" * (1 << 14)
"""256 KB: the batch of all groups is several times as large as what is made before a reply begins."""


def samples_of(number: int, **changes: object) -> list[Json]:
    """Four samples of an instance, of 1 MB together."""
    uids = [f"{number}/{n}" for n in range(4)]
    return [
        make_sample(uid=uid, instance_id=number, reward=float(n % 2), text=f"{uid} {TEXT}", **changes)
        for n, uid in enumerate(uids)
    ]


def fill(run: NativeRun, **changes: object) -> dict[str, Json]:
    """Write all groups; what was written, by uid."""
    written = [samples_of(number, **(changes if number == NUM_GROUPS - 1 else {})) for number in range(NUM_GROUPS)]
    for group in written:
        run.write(*group)
    return {sample["uid"]: sample for group in written for sample in group}


def expected(sample: Json) -> Json:
    """The row of a sample: two rewards of each kind make scores of plus and minus one."""
    return sample | {"reward": pytest.approx(2 * sample["reward"] - 1, abs=1e-7), "raw_reward": sample["reward"]}


def test_a_large_batch_has_every_row_as_it_was_written(server: ServerProcess) -> None:
    run = server.start_run(group_size=4)
    written = fill(run)
    rows = run.read(num_groups=NUM_GROUPS)["data"]
    assert [row["uid"] for row in rows] == list(written)
    assert all(row == expected(written[row["uid"]]) for row in rows)


def test_a_slime_reply_of_that_size_is_the_same(server: ServerProcess) -> None:
    run = server.start_slime("large", group_size=4)
    written = fill(run)
    rows = run.fetch()["data"]["data"]
    assert [row["uid"] for row in rows] == list(written)
    assert all(row == expected(written[row["uid"]]) for row in rows)


def test_a_row_whose_length_only_its_body_tells_may_come_last(server: ServerProcess) -> None:
    run = server.start_run(group_size=4)
    written = fill(run, extra_info={"reward": "of another kind"})
    rows = run.read(num_groups=NUM_GROUPS)["data"]
    assert all(row == expected(written[row["uid"]]) for row in rows)


@pytest.mark.soak
def test_binary_samples_among_the_last_are_lists_also_after_a_restart(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=4)
    fill(run)
    tokens = array("i", range(50_000))
    bodies = [json.dumps(make_sample(uid=f"b{n}", instance_id="binary", reward=float(n % 2))) for n in range(4)]
    packed = join_samples([pack(body.encode(), tokens.tobytes()) for body in bodies])
    run.client.post(f"{run.path}/samples", content=packed, headers={"content-type": SAMPLES_TYPE}).raise_for_status()
    for _ in range(2):
        batch = run.read(num_groups=NUM_GROUPS + 1)
        assert [row["tokens"] == tokens.tolist() for row in batch["data"][-4:]] == [True] * 4
        run.client.post(f"{run.path}/batches/{batch['batch_id']}/release").raise_for_status()
        server.kill9()
        server.restart()


def test_a_client_that_leaves_in_the_middle_leaves_its_groups_to_the_next(server: ServerProcess) -> None:
    run = server.start_run(group_size=4)
    written = fill(run)
    with run.client.stream("POST", f"{run.path}/batches", json={"num_groups": NUM_GROUPS}) as reply:
        assert len(next(reply.iter_raw())) < int(reply.headers["content-length"])
    rows = run.read(num_groups=NUM_GROUPS, wait_s=10)["data"]
    assert [row["uid"] for row in rows] == list(written)
    assert "Exception in ASGI" not in server.log()


def instances_behind(segment: Path, offset: int) -> set[int]:
    """The instances of the samples that end behind ``offset`` in a segment."""
    found = list(re.finditer(rb'"uid": ?"(\d+)/', segment.read_bytes()))
    ends = [*(match.start() for match in found[1:]), segment.stat().st_size]
    return {int(match[1]) for match, end in zip(found, ends, strict=True) if end > offset}


def test_a_body_that_turns_out_damaged_ends_the_reply_and_costs_its_group(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=4 << 20)
    run = server.start_run(group_size=4)
    written = fill(run)
    segment = sorted((server.data_dir / "segments").glob("*.log"))[3]
    damaged = instances_behind(segment, 2 << 20)
    assert 1 <= len(damaged) <= 4
    os.truncate(segment, 2 << 20)
    with pytest.raises(httpx.RemoteProtocolError):
        run.read(num_groups=NUM_GROUPS)
    poll_until(lambda: len(run.groups(state="discarded")) == len(damaged))
    lost = run.groups(state="discarded")
    assert {(group["instance_id"], group["reason"]) for group in lost} == {(key, "unreadable") for key in damaged}
    rows = run.read(num_groups=NUM_GROUPS - len(lost), wait_s=10)["data"]
    assert all(row == expected(written[row["uid"]]) for row in rows)
    assert {row["instance_id"] for row in rows} == set(range(NUM_GROUPS)) - damaged


def held_segments(server: ServerProcess) -> int:
    """How often the server has a segment open, or mapped."""
    folder = str(server.data_dir / "segments")
    num_open = 0
    for link in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            num_open += os.readlink(link).startswith(folder)
    return num_open + sum(each.path.startswith(folder) for each in psutil.Process(server.pid).memory_maps())


@pytest.mark.parametrize("text", ["x" * 25_000, TEXT], ids=["short rows", "long rows"])
def test_readers_that_leave_in_the_middle_leave_no_segment_open(make_server: MakeServer, text: str) -> None:
    server = make_server()
    run = server.start_run(group_size=4)
    num_groups = 12_000_000 // (4 * len(text))
    for number in range(num_groups):
        run.write(*(make_sample(instance_id=number, reward=float(n % 2), text=text) for n in range(4)))
    before = held_segments(server)
    for _ in range(10):
        with run.client.stream("POST", f"{run.path}/batches", json={"num_groups": num_groups, "wait_s": 10}) as reply:
            assert len(next(reply.iter_raw())) < int(reply.headers["content-length"])
    poll_until(lambda: run.view()["groups"]["ready"] == num_groups)
    poll_until(lambda: held_segments(server) == before)
