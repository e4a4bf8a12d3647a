"""Batches that have left the server's memory: every answer is the one that a server gives which remembers them all."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_group, poll_until
from tests.server.test_batches import post, states

TEXT = "x" * 8_000
"""So long that a segment has eight samples."""
TIMES = re.compile(r'"(at_s|leased_at_s)": [0-9.]+')
TOKEN = re.compile(r"(batch-\d{6})-[0-9a-f]{8}")
NONE = {"batch_id": "batch-none"}

Answers = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def pair(module_servers: MakeServer) -> list[ServerProcess]:
    """A server that remembers nothing that is done with, and one that remembers all."""
    return [module_servers(segment_bytes=65_536, replay_bytes=0, remembered_samples=number) for number in (0, 65_536)]


def fill(run: NativeRun, *instances: int) -> None:
    run.write(*[s for each in instances for s in make_group(each, [0.0, 1.0], extra_info={"text": TEXT})])


def told(run: NativeRun, method: str, path: str, **body: Any) -> Any:
    """The answer, without what no two servers have in common."""
    answer = run.client.request(method, f"{run.path}/{path}", **({"json": body} if method == "POST" else {}))
    text = TIMES.sub("", TOKEN.sub(r"\1", json.dumps(answer.json()).replace(run.run_id, "RUN")))
    return answer.status_code, text


def shown(run: NativeRun) -> Any:
    """What can be looked at of batches and checkpoints, and which bodies are there once all have gone that may."""
    assert run.client.post("/v1/gc").status_code == 200
    lists = [told(run, "GET", f"batches?state={state}") for state in ("acked", "released", "expired", "revoked")]
    bodies = {g["group_id"]: [s["has_body"] for s in run.group(g["group_id"])["samples"]] for g in run.groups()}
    return told(run, "GET", "batches"), lists, told(run, "GET", "checkpoints"), run.view()["groups"], bodies


def as_one(pair: list[ServerProcess], story: Callable[[ServerProcess], Answers]) -> Answers:
    """What both servers tell in a story."""
    with ThreadPoolExecutor(2) as pool:
        small, large = pool.map(story, pair)
    assert [what for what, _ in small] == [what for what, _ in large]
    for (what, got), (_, expected) in zip(small, large, strict=True):
        assert got == expected, what
    return small


def without_checkpoints(server: ServerProcess) -> Answers:
    run = server.start_run(group_size=2)
    fill(run, *range(1, 9))
    first = run.take(num_groups=2, request_id="first", step=3)
    run.release(released := run.read(num_groups=1, request_id="released"))
    late = run.read(num_groups=1, lease_s=0.05)
    poll_until(lambda: [batch["state"] for batch in run.batches(state="expired")])
    second = run.take(num_groups=1, request_id="second", step=12)
    leased = run.read(num_groups=1, request_id="leased")
    server.kill9()
    server.restart()
    answers: Answers = [("after the restart", shown(run))]
    for name, batch in (("first", first), ("released", released), ("late", late), ("second", second), ("none", NONE)):
        calls = {
            call: told(run, "POST", f"batches/{batch['batch_id']}/{call}") for call in ("ack", "release", "extend")
        }
        answers += [(name, calls), (f"{name} again", told(run, "POST", f"batches/{batch['batch_id']}/ack"))]
    assert "batch 'batch-000004' (step 12) has its groups now" in dict(answers)["late"]["ack"][1]
    for request_id in ("first", "second", "leased", "released"):
        answers.append((request_id, told(run, "POST", "batches", num_groups=1, request_id=request_id)))
    assert run.ack(leased)["state"] == "acked"
    answers.append(("at the end", shown(run)))
    # The first checkpoint holds all of them.
    named = [told(run, "POST", "checkpoints", step=1), told(run, "POST", "rewind", step=1)]
    answers.append(("checkpoint", [*named, shown(run), told(run, "POST", "rewind", step=None), shown(run)]))
    answers.append(("again", told(run, "POST", "batches", num_groups=8)))
    run.stop()
    return answers


def train(run: NativeRun, *steps: int) -> list[Json]:
    """For each step eight groups that are written, delivered as two batches, and held by a checkpoint."""
    first = []
    for step in steps:
        fill(run, *range(8 * step, 8 * step + 8))
        batches = [run.take(num_groups=4, step=step) for _ in range(2)]
        run.checkpoint(step, *batches)
        first.append(batches[0])
    return first


def with_checkpoints(server: ServerProcess) -> Answers:
    run = server.start_run(group_size=2, keep_checkpoints=2)
    first = train(run, 1, 2, 3, 4)
    fill(run, 100)
    unfixed = run.take(num_groups=1)
    server.kill9()
    server.restart()
    answers: Answers = [("after the restart", shown(run))]
    assert list(answers[0][1][-1].values()) == [[False] * 2] * 16 + [[True] * 2] * 17, "the last two are kept"
    for step in (1, 2, 3, 4):
        body: Json = {"step": step, "batch_ids": [first[0]["batch_id"]]}
        answers.append((f"fixed to {step}", told(run, "POST", "checkpoints", **body)))
    answers.append(("reported again", told(run, "POST", "checkpoints", step=3, batch_ids=[])))
    answers.append(("refused", told(run, "POST", "checkpoints", step=2, batch_ids=[unfixed["batch_id"]])))
    answers.append(("too far back", told(run, "POST", "rewind", step=1)))
    assert "that of step 2;" in answers[-1][1][1]
    answers.append(("rewind", told(run, "POST", "rewind", step=3)))
    answers.append(("rewound", shown(run)))
    assert post(run, f"batches/{unfixed['batch_id']}/ack").json()["error"]["code"] == "lease_lost"
    answers.append(("lost", told(run, "POST", f"batches/{unfixed['batch_id']}/ack")))
    answers.append(("read again", told(run, "POST", "batches", num_groups=8)))
    run.checkpoint(5, run.take(num_groups=1))
    server.kill9()
    server.restart()
    answers.append(("at the end", shown(run)))
    run.stop()
    return answers


def by_a_list(server: ServerProcess) -> Answers:
    run = server.start_slime("gone", group_size=2)
    fill(run, *range(6))
    for _ in range(3):
        assert len(run.fetch(batch_size=4)["data"]["data"]) == 4
    assert server.stop() == 0  # with the acknowledgements, for which nobody has waited
    server.restart()
    again = server.start_slime("gone", group_size=2, skip_instance_ids=[0, 1, 3])
    assert again.run_id == run.run_id
    answers: Answers = [("resumed", [shown(run), sorted(states(run).items())])]
    rows = again.fetch()["data"]["data"]
    assert [row["instance_id"] for row in rows] == [2, 2, 4, 4, 5, 5]
    run.stop()
    return answers


@pytest.mark.parametrize("story", [without_checkpoints, with_checkpoints, by_a_list])
def test_a_server_that_remembers_no_batch_says_the_same(
    pair: list[ServerProcess], story: Callable[[ServerProcess], Answers]
) -> None:
    assert as_one(pair, story)
