"""Several runs as one: in shares that hold through kills, and with what one run's client does."""

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.client import BufferClient, MixedClient, Rows, SampleWriter, ServerUnreachable
from forebay.client.tensors import collate, numpy_arrays
from forebay.client.trainer.marked_steps import MarkedSteps
from forebay.client.trainer.mixed_batch import MixedBatch
from forebay.client.trainer.shares import Shares
from forebay.core.errors import CheckpointNotFound, InvalidInput, RunEnded
from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import (
    FAILS_WITH_A_HINT,
    Json,
    NativeRun,
    ServerProcess,
    make_group,
    make_sample,
    poll_until,
    write_generator,
)

ROOT = Path(__file__).parents[2]
WEIGHTS = {"a": 6.0, "b": 3.0, "c": 1.0}


def fill(run: NativeRun, name: str, num_groups: int) -> NativeRun:
    """Groups of two samples with token arrays, whose instances name their run."""
    with SampleWriter(run.server.url, run.run_id) as writer:
        for number in range(num_groups):
            for slot in range(2):
                length = 3 + (number + slot) % 4
                arrays = {"tokens": list(range(length)), "logprobs": [-0.5] * length, "loss_mask": [1] * length}
                side = {"seen": Rows(np.full((length, 1), number, np.int32), [(0, length)])}
                uid, reward = f"{name}{number}/{slot}", float(slot)
                sample = make_sample(uid=uid, instance_id=f"{name}{number}", reward=reward, arrays=side, **arrays)
                writer.write(sample)
    return run


def start(server: ServerProcess, num_groups: int, names: str = "abc") -> dict[str, NativeRun]:
    return {name: fill(server.start_run(group_size=2, name=name), name, num_groups) for name in names}


def mixed(runs: dict[str, NativeRun], weights: dict[str, float] | None = None, **options: Any) -> MixedClient:
    """A client by run id: other tests' runs on the server may have the same names."""
    url = next(iter(runs.values())).server.url
    return MixedClient(url, {runs[name].run_id: weight for name, weight in (weights or WEIGHTS).items()}, **options)


@pytest.fixture
def runs(server: ServerProcess) -> dict[str, NativeRun]:
    return start(server, 20)


@pytest.fixture
def client(runs: dict[str, NativeRun]) -> Iterator[MixedClient]:
    with mixed(runs) as client:
        yield client


def take(client: MixedClient, num_groups: int, **asked: Any) -> MixedBatch:
    batch = client.read(num_groups, wait_s=20, **asked)
    assert batch is not None
    return batch


def names_of(batch: MixedBatch) -> list[str]:
    return [str(group.instance_id) for group in batch.groups]


def ready(run: NativeRun) -> int:
    return int(run.view()["groups"]["ready"])


@pytest.mark.parametrize("num_steps", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_a_mix_is_the_same_when_its_trainer_and_its_server_are_killed(
    make_server: MakeServer, tmp_path: Path, num_steps: int
) -> None:
    num_groups, seen = 7, []
    for kills in ([], [3, num_steps // 2, num_steps - 5]):
        server = make_server()
        runs = start(server, 0)
        for name, run in runs.items():
            enough = range(int(num_steps * num_groups * WEIGHTS[name] / 10) + 4)
            run.write(*(sample for number in enough for sample in make_group(f"{name}{number}", [0.0, 1.0])))
        models = tmp_path / f"models-{len(kills)}"
        command = [sys.executable, "-m", "tests.client.mixed_trainer", server.url, str(models), str(num_groups)]
        command += [str(num_steps), json.dumps(WEIGHTS)]
        for kill in kills:
            with subprocess.Popen(command, cwd=ROOT) as trainer:
                poll_until(
                    lambda path=models, at=kill: path.exists() and path.read_text().count("\n") >= at, timeout_s=90
                )
                trainer.kill()
            server.kill9()
            server.restart()
        subprocess.run(command, cwd=ROOT, check=True)
        seen.append([json.loads(line) for line in models.read_text().splitlines()])
        server.close()
    assert seen[0] == seen[1]
    for step in range(1, num_steps + 1):
        delivered = [name for names in seen[0][:step] for name in names]
        for name, weight in WEIGHTS.items():
            of_run = [each for each in delivered if each[0] == name]
            assert of_run == [f"{name}{number}" for number in range(len(of_run))]
            assert abs(len(of_run) - step * num_groups * weight / 10) <= 2


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1)), min_size=1, max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
)
def test_no_run_leaves_its_share_whatever_minimum_below_it_is_given(
    runs: list[tuple[float, float]], batches: list[int]
) -> None:
    weights = {f"run-{n}": weight for n, (weight, _) in enumerate(runs)}
    total = sum(weights.values())
    least = {f"run-{n}": weight / total * part for n, (weight, part) in enumerate(runs)}
    shares = Shares(weights, least)
    for at, num_groups in enumerate(batches, start=1):
        quotas = shares.quotas(num_groups)
        assert sum(quotas.values()) == num_groups
        assert all(quotas.get(run, 0) >= int(num_groups * share) for run, share in least.items())
        for run, weight in weights.items():
            assert abs(shares.delivered[run] - sum(batches[:at]) * weight / total) <= 2


def test_a_minimum_above_a_weight_is_kept(runs: dict[str, NativeRun]) -> None:
    with mixed(runs, {"a": 9, "b": 1}, min_shares={runs["b"].run_id: 0.5}) as client:
        for _ in range(3):
            assert [name[0] for name in names_of(take(client, 3))].count("b") == 1


@pytest.mark.parametrize("as_tensors", [True, False])
def test_a_mixed_batch_is_what_its_runs_deliver(runs: dict[str, NativeRun], as_tensors: bool) -> None:
    with mixed(runs, as_tensors=as_tensors) as client:
        batch = take(client, 10, step=4)
        assert sorted(names_of(batch)) == sorted([*(f"a{n}" for n in range(6)), "b0", "b1", "b2", "c0"])
        assert {row["run_id"]: row["instance_id"][0] for row in batch.rows} == {
            run.run_id: name for name, run in runs.items()
        }
        whole = collate(batch, pad_token_id=-1)
        at = 0
        for part in batch.parts.values():
            own, end = collate(part, pad_token_id=-1), at + len(part.rows)
            assert whole["tokens"][at:end, : own["tokens"].shape[1]].tolist() == own["tokens"].tolist()
            assert whole["rewards"][at:end].tolist() == own["rewards"].tolist()
            at = end
        assert whole["group_index"].tolist() == [n for n in range(10) for _ in range(2)]
        if as_tensors:
            assert numpy_arrays(batch)["offsets"].tolist() == np.cumsum([0, *whole["attention_mask"].sum(1)]).tolist()
        few = [batch.rows[at] for at in (19, 0, 7)]  # of three runs, in another order
        found = client.arrays(batch.batch_id, few, needs=["seen"])
        assert [int(each["seen"].data[0, 0]) for each in found] == [int(row["instance_id"][1:]) for row in few]
        assert client.images(batch, few) == [[], [], []]
        row, name = batch.rows[0], client._names[batch.rows[0]["run_id"]]
        client.annotate(row["uid"], {"kl": 0.25}, step=4, batch=batch.parts[name])
        numbers = client.metrics(batch)
        assert numbers["forebay/groups/ready"] == 50
        assert numbers["forebay/wait_s"] == batch.wait_s
        assert numbers[f"forebay/mix/{runs['a'].run_id}"] == 0.6
        assert numbers["forebay/reward/mean"] == 0.5
    notes = runs[row["instance_id"][0]]
    assert '"kl":0.25' in poll_until(lambda: notes.client.get(f"{notes.path}/annotations").text)


def test_every_method_of_one_runs_client_is_there() -> None:
    public = {name for name, _ in inspect.getmembers(BufferClient) if not name.startswith("_")}
    assert public <= vars(MixedClient).keys()


def test_checkpoints_and_leases_are_those_of_all_runs(client: MixedClient, runs: dict[str, NativeRun]) -> None:
    first, second = take(client, 2), take(client, 8)
    assert {row["instance_id"][0] for row in first.rows} == {"a", "b"}
    client.ack(first)
    client.checkpoint(1, first)
    with pytest.raises(InvalidInput, match="not a batch of this client"):
        client.checkpoint(2, "batch-000001-aa")
    client.checkpoint(2)
    assert [(each.step, each.num_groups) for each in client.checkpoints()] == [(1, 2), (2, 8)]
    assert [len(run.client.get(f"{run.path}/checkpoints").json()["checkpoints"]) for run in runs.values()] == [2, 2, 2]
    third = take(client, 10)
    client.release(third.parts[runs["a"].run_id])
    client.release(third)
    assert names_of(take(client, 10)) == names_of(third)
    with pytest.raises(CheckpointNotFound, match="known steps: 1, 2"):
        client.rewind(3)
    undone = client.rewind(1)
    assert (undone.num_groups, undone.checkpoints) == (18, [1])
    assert names_of(take(client, 8)) == names_of(second)


def test_a_run_can_join_later(runs: dict[str, NativeRun]) -> None:
    with mixed(runs, {"a": 1, "b": 1}) as client:
        take(client, 4)
        client.checkpoint(1)
    with mixed(runs, {"a": 1, "b": 1, "c": 1}) as client:
        client.rewind(1)
        assert {name[0] for name in names_of(take(client, 2))} == {"c"}  # which is behind
        steps = MarkedSteps(client)
        steps.begin(2)
        with steps.step(2) as step:
            step.collect(5, lambda batch: batch.groups)
        assert [(each.step, each.num_groups) for each in client.checkpoints()] == [(1, 4), (2, 5)]
        assert [ready(run) for run in runs.values()] == [17, 17, 17]


def test_a_step_that_not_all_runs_have_is_no_checkpoint(client: MixedClient, runs: dict[str, NativeRun]) -> None:
    for step in (1, 2):
        take(client, 10)
        client.checkpoint(step)
    take(client, 10)
    client.clients[runs["a"].run_id].checkpoint(3)  # and then the trainer was killed
    assert [each.step for each in client.checkpoints()] == [1, 2]
    with pytest.raises(CheckpointNotFound, match="known steps: 1, 2"):
        client.rewind(3)
    assert client.rewind(2).num_groups == 10


def test_a_part_that_cannot_be_released_is_not_trained_on(make_server: MakeServer) -> None:
    server = make_server()
    runs = start(server, 4, "ab")
    with MixedClient(server.url, {"a": 1, "b": 1}, retry_for_s=0.2) as client, BufferClient(server.url) as other:
        other.attach(runs["b"].run_id)
        other.read(4)
        errors = []

        def read() -> None:
            try:
                client.read(2, lease_s=4)
            except ServerUnreachable as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        poll_until(lambda: ready(runs["a"]) == 3)
        server.kill9()
        reader.join()
        assert len(errors) == 1
        server.restart()
        assert client.checkpoint(1).batch_ids == []
        poll_until(lambda: ready(runs["a"]) == 4)


def test_a_batch_waits_for_its_slowest_run_and_leases_nothing_meanwhile(
    client: MixedClient, runs: dict[str, NativeRun]
) -> None:
    expected = take(client, 10)
    client.rewind(None)
    with BufferClient(runs["c"].server.url) as other:
        other.attach(runs["c"].run_id)
        held = other.read(20)
        assert client.read(10, wait_s=0.1) is None
        assert [ready(run) for run in runs.values()] == [20, 20, 0]
        other.release(held)
    assert names_of(take(client, 10)) == names_of(expected)


def test_a_mix_ends_with_the_first_run_that_cannot_fill_its_share(runs: dict[str, NativeRun]) -> None:
    runs["a"].stop()
    with mixed(runs) as client:
        batches = list(client.batches(10, step=1))
        assert [batch.step for batch in batches] == [1, 2, 3]  # runs that go on have more
        stats = client.stats()
        assert (stats.has_ended, stats.groups["ready"]) == (True, 0)
        with pytest.raises(RunEnded, match="with fewer groups than its share of 6"):
            client.read(10)
    assert [ready(run) for run in runs.values()] == [20, 20, 20]


def test_steps_of_adapters_are_steps_of_all_runs(runs: dict[str, NativeRun]) -> None:
    runs["a"].stop()
    with mixed(runs) as client:
        steps = MarkedSteps(client)
        for number in (1, 2, 3):
            steps.begin(number)
            with steps.step(number) as step:
                assert len(step.collect(10, lambda batch: batch.groups)) == 10
        with pytest.raises(RunEnded, match="0 groups are left, step 4 needs 10"), steps.step(4) as step:
            step.collect(10, lambda batch: batch.groups)
        assert [ready(run) for run in runs.values()] == [2, 11, 17]
        steps.begin(2)  # as in a new process, which has the model of step 1
        assert [ready(run) for run in runs.values()] == [14, 17, 19]


def test_a_run_that_failed_ends_the_mix_with_its_name(server: ServerProcess) -> None:
    write_generator(server.generators, FAILS_WITH_A_HINT, "hints_generator.py")
    runs = start(server, 10, "a")
    failed = server.start_run("hints", name="z")
    failed.wait_for_state("failed")
    with (
        MixedClient(server.url, {"a": 1, "z": 1}) as client,
        pytest.raises(RunEnded, match=r"'z' has ended \(failed: .*dataset"),
    ):
        next(client.batches(4))
    assert ready(runs["a"]) == 10


@pytest.mark.parametrize(
    ("weights", "least", "field"),
    [
        ({"a": 1, "nothing": 1}, {}, "runs.nothing"),
        ({"a": 0}, {}, "runs.a"),
        ({"a": float("nan")}, {}, "runs.a"),
        ({"a": "6"}, {}, "runs.a"),
        ({"a": None}, {}, "runs.a"),
        ({}, {}, "runs"),
        (["a"], {}, "runs"),
        ({"a": 1}, {"a": "1"}, "min_shares.a"),
        ({"a": 1}, {"a": 1.5}, "min_shares.a"),
        ({"a": 1}, {"b": 0.1}, "min_shares.b"),
        ({"a": 1, "b": 1}, {"a": 0.6, "b": 0.6}, "min_shares"),
    ],
)
def test_what_cannot_be_mixed_is_refused(server: ServerProcess, weights: Json, least: Json, field: str) -> None:
    server.start_run(name="a")
    with pytest.raises(InvalidInput) as refused:
        MixedClient(server.url, weights, min_shares=least)
    assert refused.value.field == field


def test_what_a_mix_cannot_do_is_refused(client: MixedClient, runs: dict[str, NativeRun]) -> None:
    first, second = take(client, 2), take(client, 8)
    assert client.stats().groups["open"] == 0
    foreign = [row for row in second.rows if row["instance_id"].startswith("c")]
    for call, field in (
        *((lambda size=size: client.read(size), "num_groups") for size in (0, -3, 2.5, "4", None)),
        (lambda: client.read(batch_size=8), "num_groups"),
        (lambda: client.read(8, batch_size=8), "num_groups"),
        (lambda: client.arrays(first, foreign), "rows"),
        (lambda: client.images(first, [{}]), "rows"),
        (lambda: client.start("math"), "runs"),
        (lambda: client.attach("a"), "runs"),
    ):
        with pytest.raises(InvalidInput) as refused:
            call()
        assert refused.value.field == field
    assert [ready(run) for run in runs.values()] == [14, 17, 19]


def test_a_run_that_is_paused_below_its_share_is_named(server: ServerProcess, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instance_id": n, "prompt": "x", "label": "1"}) + "\n" for n in range(8)))
    answers = cycle(["\\boxed{1}", "\\boxed{2}"])
    with ScriptedEngine(lambda _: next(answers)).in_thread() as engine:
        run = server.start_run(
            "math",
            2,
            input_file=str(rows),
            remote_engine_url=engine.url,
            num_process=1,
            oversampling={"groups_per_step": 2},
        )
        with (
            MixedClient(server.url, {run.run_id: 1}) as client,
            pytest.raises(InvalidInput, match="fewer groups than its share of 4") as refused,
        ):
            client.read(4, wait_s=60)
        assert "groups_per_step" in refused.value.hint


def test_engines_that_runs_share_load_weights_once(server: ServerProcess) -> None:
    with ScriptedEngine(lambda _: "x").in_thread() as engine:
        ids = [server.start_run(remote_engine_url=engine.url).run_id for _ in range(2)]
        with MixedClient(server.url, dict.fromkeys(ids, 1)) as client:
            client.set_weight_version(1)
            assert client.update_weights(2, "/models/2", "retract").workers == [engine.url]
            assert len(engine.engine.weight_updates) == 1
            assert [run.weight_version for run in (each.stats() for each in client.clients.values())] == [2, 2]
            with client.paused_engines("in_place", weight_version=3) as pause:
                assert (pause.workers, engine.engine.paused) == ([engine.url], "in_place")
            assert engine.engine.paused is None
            assert client.stats().weight_version == 3
