"""Reading a run to its end as slime's client does, and checking the account of its groups."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.kit import ServerProcess, SlimeRun, poll_until

Json = dict[str, Any]

POLL_S = 0.05


@dataclass
class Reader:
    """What was read from the run last started on ``server`` without a name."""

    server: ServerProcess
    rows: list[Json] = field(default_factory=list)
    finished: Counter[Any] = field(default_factory=Counter)
    """``finished_groups`` of every reply."""

    @property
    def delivered(self) -> Counter[Any]:
        """Rows read, by instance id."""
        return Counter(row["instance_id"] for row in self.rows)

    def poll(self) -> bool:
        """Ask once; false when the server says that nothing will come any more."""
        reply = self.server.client.post("/get_rollout_data", json={}, timeout=100)
        if reply.status_code == 410:
            return False
        assert reply.status_code == 200, reply.text
        told = reply.json()
        if told["success"]:
            self.rows += told["data"]["data"]
            self.finished.update(told["data"]["meta_info"]["finished_groups"])
        else:
            time.sleep(POLL_S)
        return True

    def read_to_the_end(self, limit_s: float) -> None:
        """Poll until the 410."""
        until_s = time.monotonic() + limit_s
        while self.poll():
            assert time.monotonic() < until_s, f"no end within {limit_s:g} s: {self.server.log()}"


def start_as_slime(server: ServerProcess, payload: Json) -> SlimeRun:
    """Start a run with a body as slime's client sends it."""
    reply = server.client.post("/start_rollout", json=payload)
    assert reply.status_code == 200, reply.text
    return SlimeRun(server, reply.json()["run_id"])


def check_account(run: SlimeRun, reader: Reader, num_rows: int, group_size: int = 8) -> Json:
    """Every group of an ended run is in a state, each discarded one has a reason, and what was acked was read once."""
    view = run.view()
    groups, discarded = view["groups"], view["discarded"]
    assert view["has_ended"], view
    assert view["num_groups_total"] == num_rows
    assert groups["acked"] + groups["discarded"] == sum(groups.values()) == num_rows, groups
    assert sum(discarded.values()) == groups["discarded"], discarded
    assert set(reader.delivered.values()) <= {group_size}
    listed = run.groups()
    assert {group["instance_id"] for group in listed if group["state"] == "acked"} == set(reader.delivered)
    assert all(group["reason"] for group in listed if group["state"] == "discarded")
    assert len({row["uid"] for row in reader.rows}) == len(reader.rows)
    return view


def processes_below(pid: int) -> list[psutil.Process]:
    """Every process that ``pid`` started, and theirs."""
    return psutil.Process(pid).children(recursive=True)


def run_process_of(server: ServerProcess) -> psutil.Process:
    """The process that runs the generator's code, once there is one."""

    def found() -> list[psutil.Process]:
        return [process for process in processes_below(server.pid) if _module(process) == "forebay.workers.runtime"]

    (process,) = poll_until(found)
    return process


def _module(process: psutil.Process) -> str:
    """What it runs; those that it may start further are named after that."""
    try:
        return next((word for word in process.cmdline() if word.startswith("forebay.")), "")
    except psutil.Error:  # it has ended since it was listed
        return ""
