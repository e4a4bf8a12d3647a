"""Answers of a run's hooks that never end cost the group that was asked about, and not the server's memory."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess, make_group, write_generator
from tests.liveness import Liveness
from tests.steady_load import resident_bytes

LIMIT_BYTES = 32 << 20
WRITES_TO_THE_SERVER = """
import os, sys, threading
TASK_TYPE = "floods"
def run_rollout(data):
    threading.Event().wait()
def answer(length):
    '''A frame that the server takes for the host's answer, on the socket that a hook can find.'''
    channel = int(sys.argv[1])
    os.write(channel, length.to_bytes(8, "big"))
    while True:
        os.write(channel, b"x" * (1 << 20))
def is_valid_group(group, min_valid_group_size, task_type):
    items = group[1]
    if "floods" in items[0]["instance_id"]:
        answer(1 << 40)
    if "fails" in items[0]["instance_id"]:
        raise ValueError("x" * (4 << 20))
    return True, True
def normalize_group_data(data, **_):
    return data[0], [{**item, "pad": "x" * (LIMIT // 2)} for item in data[1]] if "long" in data[0] else data[1]
"""

FORGES = """
import os, sys, threading
import msgspec
from forebay.hooks import host_messages as messages
TASK_TYPE = "forges"
def run_rollout(data):
    threading.Event().wait()
FORGED = {
    "another answer": msgspec.msgpack.encode(messages.Notified()),
    "lists in lists": b"\\x82\\xa4type\\xa8notified\\xa1x" + b"\\x91" * 2_000_000 + b"\\xc0",
    "at the bound": b"x" * LIMIT,
}
def is_valid_group(group, min_valid_group_size, task_type):
    if forged := FORGED.get(group[0]):
        os.write(int(sys.argv[1]), len(forged).to_bytes(8, "big"))
        left = memoryview(forged)
        while left:
            left = left[os.write(int(sys.argv[1]), left):]
    return True, True
def get_group_data_meta_info(temp_data):
    return {"text": "\\ud800" if "half a pair" in temp_data else "whole"}
"""

LONG_META_INFO = """
import threading
TASK_TYPE = "meta"
def run_rollout(data):
    threading.Event().wait()
def get_group_data_meta_info(temp_data):
    return {"long": "x" * (17 << 20)}
"""


@pytest.fixture
def server(make_server: MakeServer) -> Iterator[ServerProcess]:
    server = make_server(max_hook_answer_bytes=LIMIT_BYTES)
    source = WRITES_TO_THE_SERVER.replace("LIMIT", str(LIMIT_BYTES))
    write_generator(server.generators, source, "floods_generator.py")
    return server


def test_an_answer_beyond_the_bound_costs_its_group(server: ServerProcess) -> None:
    run = server.start_run("floods", group_size=2)
    run.write(*make_group("before", [0, 1]))
    assert len(run.take(num_groups=1, wait_s=20)["data"]) == 2
    before, limit = resident_bytes(server), f"its answer is longer than max_hook_answer_bytes ({LIMIT_BYTES})"
    for name, reason in [("floods", limit), ("long", limit), ("fails", "xxx")]:
        run.write(*make_group(name, [0, 1]))
        run.read(num_groups=1, wait_s=0)
        (group,) = [each for each in run.groups() if each["instance_id"] == name]
        assert (group["state"], group["reason"]) == ("discarded", "hook_failed"), group
        assert reason in group["detail"]
        assert len(group["detail"]) < 1 << 20
        assert resident_bytes(server) - before < 4 * LIMIT_BYTES
    hosts = [each for each in psutil.Process(server.pid).children() if "hooks.host" in " ".join(each.cmdline())]
    assert len(hosts) <= 1
    run.write(*make_group("after", [0, 1]))
    assert len(run.take(num_groups=1, wait_s=20)["data"]) == 2


def test_meta_info_beyond_its_bound_is_replaced_by_the_built_in_one(make_server: MakeServer) -> None:
    server = make_server()
    write_generator(server.generators, LONG_META_INFO, "meta_generator.py")
    run = server.start_run("meta", group_size=2)
    run.write(*make_group("group", [0, 1]))
    batch = run.take(num_groups=1, wait_s=20)
    assert len(batch["data"]) == 2
    assert "long" not in batch["meta_info"]
    assert "its answer is longer than 16777216 bytes" in server.log()


def peak_bytes(server: ServerProcess) -> int:
    """The most memory that the server has had so far."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_an_answer_of_the_wrong_shape_costs_its_group_and_no_read(make_server: MakeServer) -> None:
    limit = 128 << 20
    server = make_server(max_hook_answer_bytes=limit)
    write_generator(server.generators, FORGES.replace("LIMIT", str(limit)), "forges_generator.py")
    run = server.start_run("forges", group_size=2)
    before = peak_bytes(server)
    with Liveness(server):
        for name in ("another answer", "lists in lists", "at the bound"):
            run.write(*make_group(name, [0, 1]))
            assert run.read(num_groups=1, wait_s=0)["batch_id"] is None
            (group,) = [each for each in run.groups() if each["instance_id"] == name]
            assert (group["state"], group["reason"]) == ("discarded", "hook_failed"), group
    assert peak_bytes(server) - before < 1.5 * limit  # it is there once
    run.write(*make_group("after", [0, 1]))
    assert run.take(num_groups=1, wait_s=20)["meta_info"]["text"] == "whole"


def test_meta_info_that_no_reply_can_hold_is_replaced_by_the_built_in_one(make_server: MakeServer) -> None:
    server = make_server()
    write_generator(server.generators, FORGES.replace("LIMIT", "1"), "forges_generator.py")
    run = server.start_run("forges", group_size=2)
    run.write(*make_group("half a pair", [0, 1]))
    batch = run.take(num_groups=1, wait_s=20)
    assert len(batch["data"]) == 2
    assert batch["meta_info"]["total_samples"] == 2
