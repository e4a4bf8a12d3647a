"""Workers on two Ray nodes with addresses of their own, and a token."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_kit import TwoNodes, other_forebay
from tests.kit import poll_until
from tests.worker_kit import is_running

pytestmark = pytest.mark.cluster

CONTROLLER = """
import json, sys, time
from forebay.core.errors import ForebayError
from forebay.workers.backends.abc import WorkerSpec
from forebay.workers.backends.ray import RayBackend
from forebay.workers.members.worker import ClassWithInitArgs
from tests.worker_kit import Probe, call

def say(**what):
    print(json.dumps(what), flush=True)

def place(worker):
    where = call(worker, "where").result(90)
    return [where["node"], where["pid"]]

def start(specs):
    try:
        workers = backend.start(specs)
        for worker in workers:
            worker.started.result(90)
    except ForebayError as error:
        say(error=type(error).__name__, message=str(error), hint=error.hint)
        return []
    say(places=[place(worker) for worker in workers])
    return workers

try:
    backend = RayBackend(sys.argv[1], placement_s=float(sys.argv[2]))
except ForebayError as error:
    say(error=type(error).__name__, message=str(error), hint=error.hint)
    sys.exit()

def specs():
    classes = {"": ClassWithInitArgs(Probe)}  # the same object for all workers of a group
    return [WorkerSpec(r, 4, r % 2, 2, r // 2, classes, {}, cpus=1.0) for r in range(4)]

workers = start(specs())
for worker in workers:
    worker.on_lost(lambda reason, rank=worker.spec.rank: say(lost=rank, reason=reason))
for line in sys.stdin:
    start(specs()[2:])
"""


class Controller:
    """A process on the head node that says in lines of JSON what it sees."""

    def __init__(self, nodes: TwoNodes, folder: Path, placement_s: float = 3.0, **variables: str) -> None:
        (folder / "controller.py").write_text(CONTROLLER)
        path = os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            nodes.inside(0, sys.executable, str(folder / "controller.py"), nodes.address, str(placement_s)),
            env=nodes.environ(**{"PYTHONPATH": path, **variables}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def tried_again(self, key: str) -> int:
        """How many lines have this key, after the workers were started once more or could not be."""
        num_tried = len(self.having("places")) + len(self.having("error"))
        self.start_again()
        poll_until(lambda: len(self.having("places")) + len(self.having("error")) > num_tried, 90.0)
        return len(self.having(key))

    def wait_for(self, key: str, number: int = 1, limit_s: float = 90.0) -> list[dict[str, Any]]:
        """The lines that have this key, once there are as many."""
        try:
            poll_until(lambda: len(self.having(key)) >= number, limit_s)
        except AssertionError as error:
            raise AssertionError(f"no {key!r} within {limit_s} s, but {self.lines}") from error
        return self.having(key)

    def having(self, key: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if key in line]

    def start_again(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # others are what Ray says of the logs of nodes
                self.lines.append(json.loads(line))


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as both:
        yield both


@pytest.fixture
def control(nodes: TwoNodes, tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    begun: list[Controller] = []

    def begin(**options: Any) -> Controller:
        begun.append(Controller(nodes, tmp_path, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


def test_who_has_not_the_token_joins_no_cluster_and_starts_none(
    nodes: TwoNodes, control: Callable[..., Controller]
) -> None:
    refused = control(RAY_AUTH_TOKEN="f" * 64).wait_for("error")[0]
    assert refused["error"] == "WorkerError"
    assert f"the Ray cluster at {nodes.address} cannot be joined" in refused["message"]
    assert "RAY_AUTH_TOKEN" in refused["hint"]


def test_a_node_that_dies_takes_its_workers_along_and_others_get_places_when_it_is_back(
    nodes: TwoNodes, control: Callable[..., Controller]
) -> None:
    controller = control()
    places = controller.wait_for("places")[0]["places"]
    by_node = [{node for node, _ in places[:2]}, {node for node, _ in places[2:]}]
    assert all(len(each) == 1 for each in by_node)
    assert by_node[0] | by_node[1] == set(nodes.ips)
    second = nodes.ips[1]
    dying = {rank for rank, (node, _) in enumerate(places) if node == second}

    killed_s = time.monotonic()
    nodes.kill(1)
    lost = controller.wait_for("lost", 2, 60.0)
    print(f"lost after {time.monotonic() - killed_s:.1f} s: {lost}")
    assert {each["lost"] for each in lost} == dying
    assert all(is_running(pid) for node, pid in places if node != second)

    controller.start_again()
    refused = controller.wait_for("error")[0]
    assert refused["error"] == "PlacementFailed"
    assert "need CPU" in refused["message"]
    assert f"{nodes.ips[0]}: CPU 0" in refused["message"]

    nodes.start(1)
    poll_until(lambda: controller.tried_again("places") == 2, 90.0)  # a busy machine may take longer than placement_s
    anew = controller.having("places")[1]["places"]
    assert {node for node, _ in anew} == {second}

    everywhere = [pid for _, pid in places + anew if is_running(pid)]
    assert len(everywhere) == 4
    controller.process.kill()
    poll_until(lambda: not any(map(is_running, everywhere)), 60.0)


def test_a_node_with_another_forebay_is_refused_by_its_address_with_both_versions(
    nodes: TwoNodes, control: Callable[..., Controller], tmp_path: Path
) -> None:
    nodes.kill(1)
    nodes.start(1, PYTHONPATH=other_forebay(tmp_path))
    controller = control(placement_s=60.0)

    def refusals() -> list[dict[str, Any]]:
        # The cluster may take the node that was killed for the new one, until it has seen its death.
        num_tried = len(controller.having("error"))
        errors = controller.wait_for("error", num_tried + 1)
        controller.start_again()
        return [error for error in errors if error["error"] == "InvalidInput"]

    refused = poll_until(refusals, 90.0)[0]
    assert f"node {nodes.ips[1]} has Forebay 0.0.9 (here " in refused["message"]
