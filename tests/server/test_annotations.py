"""A trainer's own numbers of samples: stored beside them, read again, and never delivered."""

import json
from typing import Any

import numpy
import pytest
import torch

from forebay.client import AsyncBufferClient, BufferClient
from forebay.client.sample_writer.encode import SAMPLES_TYPE, join_samples
from forebay.client.trainer.annotate import encode_note
from forebay.core.errors import InvalidInput
from forebay.core.safetensors_format import read_blob
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_sample

SPANS = [
    {"source": "environment", "start": 0, "end": 4},
    {"source": "llm", "start": 4, "end": 7, "weight_version": 1},
    {"source": "tool", "start": 7, "end": 8},
    {"source": "llm", "start": 8, "end": 10, "weight_version": 2},
]
MASK = [0, 0, 0, 0, 1, 1, 1, 0, 1, 1]
LOGPROBS = [0, 0, 0, 0, -0.5, -1.0, -0.25, 0, -2.0, -0.125]


def written(run: NativeRun, *instance_ids: str) -> None:
    """A group for each id: two samples of ten tokens, six of which are the response."""
    tokens = {"tokens": list(range(10)), "loss_mask": MASK, "logprobs": LOGPROBS, "token_spans": SPANS}
    uids = [(name, n) for name in instance_ids for n in range(2)]
    run.send(make_sample(**tokens, uid=f"{name}/{n}", instance_id=name, reward=float(n)) for name, n in uids)


def notes(run: NativeRun, **query: Any) -> list[Json]:
    reply = run.client.get(f"{run.path}/annotations", params=query)
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def test_notes_are_stored_once_and_change_no_batch_also_after_a_kill(make_server: MakeServer) -> None:
    run = make_server().start_run(group_size=2)
    written(run, "a")
    asked = {"num_groups": 1, "request_id": "r"}
    before = run.client.post(f"{run.path}/batches", json=asked)
    batch = before.json()
    [group_id], shown = batch["group_ids"], run.group(batch["group_ids"][0])
    counts = run.view()["samples"]
    counts["buffered_bytes"] += 144  # the part
    trainer = torch.tensor([-0.5, float("nan"), -0.25, 0, -2.5, -0.125], dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        with BufferClient(run.server.url) as client:
            client.attach(run.run_id)
            for _ in range(2):
                client.annotate("a/0", {"trainer_logprobs": trainer, "loss": 0.5}, step=3, batch=batch["batch_id"])
    assert run.view()["samples"] == counts
    run.server.kill9()
    run.server.restart()
    [note] = notes(run)
    assert (note["uid"], note["step"], note["producer"], note["values"]) == ("a/0", 3, "trainer", {"loss": 0.5})
    assert note["arrays"] == {"trainer_logprobs": {"dtype": "F32", "shape": [], "rows": [[0, 0, 4, 10]]}}
    part = run.client.get(f"{run.path}/groups/{group_id}/parts/{note['parts'][0]}").content
    found = numpy.frombuffer(read_blob(part)["trainer_logprobs"].data, "float32")
    assert numpy.array_equal(found, trainer.detach().float(), equal_nan=True)
    assert run.client.post(f"{run.path}/batches", json=asked).content == before.content
    assert run.group(group_id)["samples"] == shown["samples"]
    assert run.view()["samples"]["buffered_bytes"] == counts["buffered_bytes"]


async def test_a_client_annotates_what_it_has_read_also_after_the_ack(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    written(run, "a", "b")
    async with AsyncBufferClient(server.url, as_tensors=True) as client:
        await client.attach(run.run_id)
        batches = [await client.read(num_groups=1), await client.read(num_groups=1)]
        for step, batch in enumerate(batches):
            assert batch is not None
            await client.ack(batch)
            for row in batch.rows:
                await client.annotate(row["uid"], {"entropy": list(range(10))}, step=step, producer="critic")
        with pytest.raises(InvalidInput, match="this client has read"):
            await client.annotate("c/0", {"loss": 1.0}, step=0)
    found = notes(run)
    assert [(note["uid"], note["step"]) for note in found] == [("a/0", 0), ("a/1", 0), ("b/0", 1), ("b/1", 1)]
    assert notes(run, step=1) == found[2:]
    assert notes(run, uid="a/1") == [found[1]]
    assert notes(run, group=found[2]["group_id"]) == found[2:]
    assert notes(run, group=found[2]["group_id"], uid="b/1", step=1) == found[3:]
    assert notes(run, group=found[2]["group_id"], uid="a/1") == notes(run, group="none") == []
    assert notes(run, limit=2, after=found[0]["id"]) == found[1:3]
    assert notes(run, after=found[3]["id"]) == []
    assert_error(run.client.get(f"{run.path}/annotations?after=x"), 422, "invalid_input", "after")
    # A rewind makes the groups ready again; their notes stay. A replay has none.
    run.rewind(None)
    assert [row["uid"] for row in run.read(num_groups=2)["data"]] == ["a/0", "a/1", "b/0", "b/1"]
    assert notes(run) == found
    run.stop()
    replayed = NativeRun(server, run.client.post("/v1/runs", json={"replay": run.run_id}).json()["run_id"])
    assert len(replayed.read(num_groups=2, wait_s=20)["data"]) == 4
    assert notes(replayed) == []


def test_wrong_notes_are_refused_alone(server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    written(run, "a", "b")
    batch = run.read(num_groups=1)
    path = f"{run.path}/batches/{batch['batch_id']}/annotations"
    frames = [encode_note("a/0", {"entropy": [0.5] * num}, 0, "trainer") for num in (10, 6, 7)]
    frames.append(join_samples([b'{"uid": "b/0", "step": 0}', b'{"uid": "a/1", "step": -1}']))
    reply = run.client.post(path, content=b"".join(frames), headers={"Content-Type": SAMPLES_TYPE}).json()["results"]
    assert [each["status"] for each in reply] == [200, 200, 422, 422, 422]
    assert [each["error"].get("field") for each in reply[2:]] == ["arrays.entropy", "uid", "body"]
    note = {"uid": "a/0", "step": 0, "values": {"loss": 1.5, "kl": None}}
    verdicts = [run.client.post(path, json=body).json()["results"] for body in (note, [note])]
    assert [each["duplicate"] for [each] in verdicts] == [False, True]
    assert_error(run.client.post(path, json={"uid": "b/0", "step": 0}), 422, "invalid_input", "uid")
    assert_error(run.client.post(path.replace(batch["batch_id"], "batch-9"), json=note), 404, "batch_not_found")
    run.rewind(None)
    assert_error(run.client.post(path, json=note), 409, "lease_lost")
    assert len(notes(run)) == 3
