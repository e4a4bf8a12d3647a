"""Stored samples go when nobody can ask for them any more, over HTTP and through ``kill -9``."""

import sqlite3
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, SlimeRun, assert_error, make_group, make_sample, poll_until

SEGMENT_BYTES = 65_536
TEXT = "x" * 8_000
"""So long that a segment has eight samples."""


@pytest.fixture
def server(make_server: MakeServer) -> ServerProcess:
    return make_server(segment_bytes=SEGMENT_BYTES, replay_bytes=0)


RUN = {"group_size": 2, "keep_checkpoints": 2}


def fill(run: NativeRun, *instances: int) -> None:
    for instance in instances:
        run.write(*make_group(instance, [0.0, 1.0], extra_info={"text": TEXT}))


def collect(run: NativeRun) -> Json:
    reply = run.client.post("/v1/gc")
    assert reply.status_code == 200, reply.text
    done: Json = reply.json()
    return done


def train(run: NativeRun, *steps: int) -> None:
    """For each step, eight groups that are written, delivered, and held by a checkpoint."""
    for step in steps:
        fill(run, *range(8 * step, 8 * step + 8))
        run.checkpoint(step, run.read(num_groups=8, step=step))


def segments(run: NativeRun) -> list[str]:
    return sorted(path.name for path in (run.server.data_dir / "segments").glob("*.log"))


def num_bodies(run: NativeRun, instance: int) -> int:
    [group] = [group for group in run.groups() if group["instance_id"] == instance]
    shown = run.client.get(f"{run.path}/groups/{group['group_id']}", params={"bodies": True}).json()
    assert [sample["uid"] for sample in shown["samples"]] == [f"{instance}/0", f"{instance}/1"]
    for sample in shown["samples"]:
        assert sample["has_body"] == (sample["body"] is not None)
        assert sample["num_bytes"] > len(TEXT)
        assert sample["body"] is None or sample["body"]["extra_info"]["text"] == TEXT
    return sum(sample["has_body"] for sample in shown["samples"])


def known(run: NativeRun) -> Json:
    """What retention must not change."""
    view = run.view()
    return {
        "groups": run.groups(),
        "counts": view["groups"],
        "batches": run.batches(),
        "checkpoints": run.client.get(f"{run.path}/checkpoints").json(),
        "skip": run.client.get(f"{run.path}/skip_instance_ids").json(),
        "samples": {g["group_id"]: _columns(run.group(g["group_id"])["samples"]) for g in run.groups()},
    }


def _columns(samples: list[Json]) -> list[Json]:
    return [{name: value for name, value in sample.items() if name != "has_body"} for sample in samples]


def rewind(run: NativeRun, step: int | None) -> httpx.Response:
    return run.client.post(f"{run.path}/rewind", json={"step": step})


def test_bodies_go_once_their_checkpoint_is_older_than_those_kept(run: NativeRun) -> None:
    train(run, 1, 2)
    before = collect(run)
    assert before["num_segments_freed"] == 0
    assert before["kept"].keys() == {"checkpointed"}
    train(run, 3, 4, 5)
    poll_until(lambda: "00000001.log" not in segments(run))
    collect(run)
    assert num_bodies(run, 8) == num_bodies(run, 23) == 0
    assert [num_bodies(run, instance) for instance in range(32, 48)] == [2] * 16
    done = collect(run)
    assert done["num_segments_freed"] == 0, "there is nothing left to do"
    assert done["num_segments"] == len(segments(run))
    assert done["num_bytes"] == sum(p.stat().st_size for p in (run.server.data_dir / "segments").glob("*.log"))


def test_a_rewind_to_a_kept_checkpoint_delivers_the_same_and_an_older_one_is_refused(run: NativeRun) -> None:
    train(run, 1, 2, 3, 4, 5)
    collect(run)
    before = known(run)
    for step in (None, 1, 2):
        error = assert_error(rewind(run, step), 409, "bodies_gone")
        assert "earliest checkpoint to rewind to is that of step 3" in error["hint"]
    assert known(run) == before, "what is refused changes nothing"
    run.rewind(4)
    again = run.read(num_groups=8)
    assert [row["uid"] for row in again["data"]] == [f"{i}/{n}" for i in range(40, 48) for n in (0, 1)]
    assert all(row["extra_info"]["text"] == TEXT for row in again["data"])
    run.release(again)
    assert run.rewind(3)["num_groups"] == 8


@pytest.mark.soak
def test_everything_but_bodies_is_there_after_restarts_and_with_a_new_index(run: NativeRun) -> None:
    train(run, 1, 2, 3, 4, 5)
    run.write(make_sample(uid="late", instance_id=8, epoch=0))
    fill(run, 200)
    before = known(run)
    assert collect(run)["kept"].keys() == {"checkpointed"}
    assert num_bodies(run, 9) == 0
    assert known(run) == before
    run.server.kill9()
    run.server.restart()
    assert known(run) == before
    renew_index(run)
    assert known(run) == before
    assert num_bodies(run, 200) == 2


def renew_index(run: NativeRun) -> None:
    run.server.kill9()
    for path in run.server.data_dir.glob("index.sqlite*"):
        path.unlink()
    run.server.restart()


@pytest.mark.soak
def test_what_is_ready_among_old_samples_moves_and_is_delivered_whole(run: NativeRun) -> None:
    fill(run, 1_000)
    kept = run.read(num_groups=1, lease_s=600)
    train(run, 1, 2, 3, 4, 5)
    collect(run)
    assert "00000001.log" in segments(run), "what is with a trainer pins its segment"
    assert collect(run)["kept"]["leased"] > 2 * len(TEXT)
    run.release(kept)
    before = known(run)
    assert collect(run)["num_segments_freed"] == 1
    assert "00000001.log" not in segments(run)
    assert known(run) == before
    again = run.read(num_groups=1)
    assert [row["uid"] for row in again["data"]] == ["1000/0", "1000/1"]
    assert [row["extra_info"]["text"] for row in again["data"]] == [TEXT, TEXT]
    run.release(again)
    renew_index(run)
    last = run.take(num_groups=1)
    assert [row["extra_info"]["text"] for row in last["data"]] == [TEXT, TEXT]


@pytest.mark.soak
def test_uids_whose_bodies_are_gone_are_still_duplicates(run: NativeRun) -> None:
    train(run, 1, 2, 3, 4, 5)
    collect(run)
    assert num_bodies(run, 8) == 0
    for _ in range(2):
        verdicts = run.write(*make_group(8, [0.0, 1.0]))
        assert [verdict["duplicate"] for verdict in verdicts] == [True, True]
        renew_index(run)


def test_what_no_checkpoint_needs_stays_for_replays_up_to_a_budget(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=SEGMENT_BYTES, replay_bytes=6 * SEGMENT_BYTES)
    run = server.start_run(group_size=2, keep_checkpoints=1)
    kept = server.start_run(group_size=2, keep_checkpoints=1, keep_bodies="true")
    train(kept, 1, 2)
    train(run, 1, 2, 3)
    done = collect(run)
    assert (done["replay_bytes"], done["num_bytes_over"]) == (6 * SEGMENT_BYTES, 0)
    assert done["kept"]["kept"] > 16 * len(TEXT)
    assert done["kept"]["replayable"] > 32 * len(TEXT)
    storage = server.client.get("/v1/runs").json()["storage"]
    assert storage["num_replayable_bytes"] == done["kept"]["replayable"]
    assert num_bodies(run, 8) == 2, "of step 1"
    train(run, 4, 5, 6)
    poll_until(lambda: not num_bodies(run, 8))
    done = collect(run)
    assert 4 * SEGMENT_BYTES < done["kept"]["replayable"] <= 7 * SEGMENT_BYTES
    assert [num_bodies(kept, instance) for instance in range(8, 24)] == [2] * 16
    assert [num_bodies(run, instance) for instance in range(40, 56)] == [2] * 16, "of steps 5 and 6"
    assert rewind(run, 1).status_code == 409
    assert run.rewind(5)["num_groups"] == 8
    for each in (run, kept):
        each.stop()


def test_without_a_budget_a_run_without_checkpoints_keeps_everything(run: NativeRun) -> None:
    fill(run, *range(40))
    run.take(num_groups=40)
    done = collect(run)
    assert (done["num_segments_freed"], done["max_bytes"], done["num_bytes_over"]) == (0, 0, 0)
    assert done["kept"].keys() == {"in_budget"}
    assert run.rewind(None)["num_groups"] == 40


def test_a_budget_takes_delivered_bodies_of_runs_without_checkpoints_oldest_first(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=SEGMENT_BYTES, max_journal_bytes=4 * SEGMENT_BYTES)
    run = server.start_run(group_size=2)
    fill(run, *range(40))
    run.release(run.read(num_groups=40))
    over = collect(run)
    assert over["num_bytes_over"] > 0
    assert over["kept"].keys() == {"ready"}
    assert "over max_journal_bytes" in server.client.get("/readyz").json()["retention"]
    assert server.client.get("/readyz").status_code == 200
    assert server.client.get("/v1/runs").json()["storage"]["num_bytes_over"] == over["num_bytes_over"]
    run.take(num_groups=40)
    done = collect(run)
    assert done["num_bytes_over"] == 0
    assert done["num_bytes"] <= 4 * SEGMENT_BYTES
    assert num_bodies(run, 0) == 0
    assert num_bodies(run, 39) == 2
    assert server.client.get("/readyz").json()["retention"] == "ok"
    error = assert_error(rewind(run, None), 409, "bodies_gone")
    assert "start another run" in error["hint"]
    run.stop()


def test_the_first_checkpoint_holds_what_the_budget_took_before_and_can_be_gone_back_to(
    make_server: MakeServer,
) -> None:
    server = make_server(segment_bytes=SEGMENT_BYTES, max_journal_bytes=4 * SEGMENT_BYTES)
    run = server.start_run(group_size=2)
    taken = []
    for instance in range(40):
        fill(run, instance)
        taken.append(run.take(num_groups=1)["batch_id"])
    assert collect(run)["num_bytes_over"] == 0
    num_gone = 40 - sum(num_bodies(run, instance) > 0 for instance in range(40))
    assert 0 < num_gone < 40
    fill(run, 100, 101)
    first = run.read(num_groups=1)
    run.read(num_groups=1)
    assert run.checkpoint(1, first)["batch_ids"] == [*taken[:num_gone], first["batch_id"]]
    collect(run)
    assert "that of step 1" in assert_error(rewind(run, None), 409, "bodies_gone")["hint"]
    assert rewind(run, 1).json()["num_groups"] == 40 - num_gone + 1
    rest = run.read(num_groups=40 - num_gone + 1)
    assert [row["instance_id"] for row in rest["data"]][::2] == [*range(num_gone, 40), 101]
    run.stop()


def test_a_budget_never_takes_what_a_rewind_may_bring_back(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=SEGMENT_BYTES, max_journal_bytes=1)
    run = server.start_run(group_size=2, keep_checkpoints=1)
    train(run, 1)
    fill(run, *range(100, 116))
    run.take(num_groups=16)
    done = collect(run)
    assert done["num_bytes_over"] > 0
    assert done["kept"].keys() == {"checkpointed", "uncheckpointed"}
    assert run.rewind(1)["num_groups"] == 16
    assert run.rewind(None)["num_groups"] == 8
    assert len(run.read(num_groups=24)["data"]) == 48
    run.stop()


def test_a_slime_trainer_that_lists_less_than_is_left_gets_a_new_run(make_server: MakeServer) -> None:
    """What it lost is generated once more; a run that it names says what is gone."""
    server = make_server(segment_bytes=SEGMENT_BYTES, max_journal_bytes=2 * SEGMENT_BYTES)
    run = server.start_slime(group_size=2)
    fill(run, *range(40))
    listed = run.fetch()["data"]["meta_info"]["finished_groups"]
    assert len(listed) == 40
    poll_until(lambda: run.view()["groups"]["acked"] == 40)
    assert collect(run)["num_segments_freed"] > 2
    whole = server.start_slime(group_size=2, skip_instance_ids=listed)
    assert whole.run_id == run.run_id, "nothing would have to be delivered once more"
    other = server.start_slime(group_size=2, skip_instance_ids=listed[20:])
    assert other.run_id != run.run_id
    assert sorted(other.client.get(f"{other.path}/skip_instance_ids").json()["skip_instance_ids"]) == listed[20:]
    payload = {"task_type": "idle", "num_repeat_per_sample": "2", "skip_instance_ids": listed[20:]}
    assert_error(server.client.post("/start_rollout", json={**payload, "run_id": run.run_id}), 409, "bodies_gone")
    SlimeRun(server, other.run_id).stop()


def test_a_run_can_be_attached_to_whatever_is_gone_of_what_it_delivered(run: NativeRun) -> None:
    train(run, 1, 2, 3, 4, 5)
    collect(run)
    assert num_bodies(run, 8) == 0
    before = known(run)
    body = {"task_type": "idle", "group_size": 2, "keep_checkpoints": 2, "run_id": run.run_id}
    assert run.client.post("/v1/runs", json=body).status_code == 201
    assert known(run) == before, "nothing is delivered once more"
    lost = run.client.post("/v1/runs", json={**body, "skip_instance_ids": []})
    assert_error(lost, 409, "bodies_gone")
    run.wait_for_state("running")


@pytest.mark.soak
def test_killed_while_collecting_nothing_needed_is_gone(run: NativeRun) -> None:
    server = run.server
    train(run, *range(1, 9))
    fill(run, *range(200, 204))
    before = known(run)
    for _ in range(6):
        with httpx.Client(base_url=server.url, timeout=0.01) as impatient, suppress(httpx.TimeoutException):
            impatient.post("/v1/gc")
        server.kill9()
        server.restart()
        assert known(run) == before
    collect(run)
    assert known(run) == before
    assert [num_bodies(run, instance) for instance in (*range(56, 72), *range(200, 204))] == [2] * 20


def test_index_and_log_agree_on_what_is_left(run: NativeRun) -> None:
    train(run, 1, 2, 3, 4, 5)
    collect(run)
    run.server.stop()
    index: Path = run.server.data_dir / "index.sqlite"

    def dump() -> list[tuple[object, ...]]:
        connection = sqlite3.connect(index)
        query = "SELECT run_id, group_id, segment, num_bytes, rows FROM samples ORDER BY group_id, segment, rows"
        rows = list(connection.execute(query))
        rows += connection.execute("SELECT group_id, number, state, batch_id FROM groups ORDER BY number")
        connection.close()
        return rows

    before = dump()
    for path in run.server.data_dir.glob("index.sqlite*"):
        path.unlink()
    run.server.restart()
    run.server.stop()
    assert sorted(map(str, dump())) == sorted(map(str, before))
    run.server.restart()
