"""Named parts of rewards: stored with the sample, averaged, and given to hooks and trainers."""

import json

import pytest

from forebay.client import BufferClient
from forebay.replay.recording import Recording
from tests.conftest import MakeServer
from tests.kit import IDLE, NativeRun, ServerProcess, assert_error, make_group, make_sample, write_generator

FILTERS = """
def filter_item(item, task_type):
    return item["reward_parts"]["format"] > 0
"""
TOKENS = {"tokens": [1, 2, 3], "logprobs": [0.0, -1.0, -1.0], "loss_mask": [0, 1, 1]}
AVERAGES = {
    "exact": {"num": 2, "mean": 0.5, "min": 0.0, "max": 1.0},
    "format": {"num": 3, "mean": 0.25, "min": -0.25, "max": 0.5},
}


@pytest.fixture
def restartable(make_server: MakeServer, tmp_path) -> ServerProcess:
    source = IDLE.replace('"idle"', '"filtering"') + FILTERS
    write_generator(tmp_path / "tasks", source, "filtering_generator.py")
    return make_server(generators=tmp_path / "tasks")


@pytest.mark.parametrize("tokens", [{}, TOKENS], ids=["json", "binary"])
def test_parts_are_averaged_and_reach_hooks_trainers_and_recordings(restartable, forebay, tmp_path, tokens) -> None:
    run = restartable.start_run("filtering", group_size=4)
    parts = [{"exact": True, "format": 0.5}, {"exact": 0, "format": 0.5}, {"format": -0.25}]
    samples = make_group("a", [0.75, 0.25, 0.5], **tokens)
    run.send({**sample, "reward_parts": part} for sample, part in zip(samples, parts, strict=True))
    run.send(make_group("b", [1.0], **tokens))
    failed = make_sample(uid="a/3", instance_id="a", reward=..., status="failed", reward_parts={"exact": 1.0})
    run.send([failed])
    assert run.view()["reward_parts"] == AVERAGES
    stored = {sample["uid"]: sample["reward_parts"] for sample in run.group(run.groups()[0]["group_id"])["samples"]}
    assert stored == {"a/0": parts[0], "a/1": parts[1], "a/2": parts[2], "a/3": None}
    with BufferClient(restartable.url) as client:
        client.attach(run.run_id)
        assert client.stats().reward_parts == AVERAGES
        batch = client.read(num_groups=1, wait_s=20)
        assert batch is not None
        assert {row["uid"]: row["reward_parts"] for row in batch.rows} == {"a/0": parts[0], "a/1": parts[1]}
        numbers = client.metrics(batch)
        client.ack(batch)
    assert (numbers["forebay/reward/exact/mean"], numbers["forebay/reward/format/mean"]) == (0.5, 0.5)
    restartable.stop()
    restartable.restart()
    assert run.view()["reward_parts"] == AVERAGES
    assert "exact 0.500 · format 0.250" in forebay("status", run.run_id, "--url", restartable.url).out
    file = tmp_path / "run.fbr"
    assert forebay("recording", "export", run.run_id, file, "--url", restartable.url).code == 0
    with Recording.open(file) as recording:
        samples_of = (recording.samples(group["group_id"]) for group in run.groups())
        recorded = {sample.row.uid: sample.row.reward_parts for samples in samples_of for sample in samples}
    assert recorded == {**stored, "b/0": None}


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ('{"exact": null}', "part 'exact' must be a finite number"),
        ('{"exact": "1"}', "part 'exact' must be a finite number"),
        ('{"a b": 1}', "name of a reward part"),
        ('{"exact": 1e999}', "must be"),
        ("[1]", "must be a mapping"),
        (json.dumps({f"test_{n}": 1 for n in range(65)}), "at most 64 parts"),
    ],
)
def test_wrong_parts_are_refused_and_slimes_routes_ignore_them(server: ServerProcess, parts: str, told: str) -> None:
    body = json.dumps(make_sample(reward_parts="HERE")).replace('"HERE"', parts)
    run = server.start_run(group_size=1)
    error = assert_error(run.client.post(f"{run.path}/samples", content=body), 422, "invalid_input", "reward_parts")
    assert told in error["message"]
    slime = server.start_slime("parts", group_size=1)
    assert slime.client.post(f"{slime.prefix}/buffer/write", content=body).status_code == 200
    assert (slime.view()["samples"]["member"], slime.view()["reward_parts"]) == (1, {})
    for each in (run, slime):
        each.stop()


def test_a_run_has_averages_of_64_names_and_a_warning_about_more(server: ServerProcess) -> None:
    run = NativeRun(server, server.start_run(group_size=2).run_id)
    for start in (0, 40):
        run.write(make_sample(reward_parts={f"test_{n}": 1.0 for n in range(start, start + 40)}))
    view = run.view()
    assert list(view["reward_parts"]) == [f"test_{n}" for n in range(64)]
    assert "parts of more than 64 names" in view["warnings"][0]
    run.stop()
