"""Modes ``cache`` and ``repeat``: what another run has recorded is used, and only what is left is generated."""

import os
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from forebay.core.ids import rollout_uid
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.e2e.reading import run_process_of
from tests.kit import ServerProcess, assert_error, poll_until
from tests.replay.modes_kit import (
    GROUP_SIZE,
    Answers,
    as_recorded,
    counts,
    finished,
    held,
    rows_of,
    scripted,
    slots,
    start,
    write_rows,
    write_words,
)
from tests.replay.replay_kit import start_replay

__all__ = ["forebay"]


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tasks = tmp_path_factory.mktemp("tasks")
    write_words(tasks)
    return module_servers(generators=tasks, start_wait_s=60, max_workers=4)


@pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.soak)])
def test_only_what_had_failed_or_is_missing_is_generated(server: ServerProcess, tmp_path: Path, workers) -> None:
    answers = Answers({"a": ["broken", "fine 0"], "b": ["unjudged", "broken"]})
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b", "c"])
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url)
        finished(recorded)
        assert answers.counted == {"a": GROUP_SIZE, "b": GROUP_SIZE, "c": GROUP_SIZE}
        before, read_before = slots(recorded), rows_of(recorded, 3)
        answers.forget()
        write_rows(rows, ["a", "b", "c", "d"])
        replay = {"source": recorded.run_id, "mode": "cache", "ignore": ["input_file"]}
        run = start(server, rows, engine.url, replay=replay, **({"workers": workers} if workers else {}))
        view = finished(run)
    assert answers.counted == {"a": 1, "b": 2, "d": GROUP_SIZE}
    assert counts(view) == (9, 3 + GROUP_SIZE, 0)
    assert view["counts"]["replay_tokens"] == sum(sum(row["loss_mask"]) for row in read_before.values())
    after = slots(run)
    assert len(after) == 4 * GROUP_SIZE
    assert all(sample["reward"] is not None for sample in after.values())
    read = rows_of(run, 4)
    assert len(read) == 4 * GROUP_SIZE
    for key, sample in before.items():
        assert (after[key]["uid"] == sample["uid"]) is (sample["reward"] is not None), key
    for uid, row in read_before.items():
        assert read[uid]["replayed_from"] == {"run_id": recorded.run_id, "uid": uid, "substitute": False}
        assert list(as_recorded(read[uid])) == list(as_recorded(row))
        assert as_recorded(read[uid]) == as_recorded(row)
    assert sum("replayed_from" in row for row in read.values()) == len(read_before)


def test_a_run_that_was_recorded_whole_needs_no_engine(server: ServerProcess, tmp_path: Path) -> None:
    answers = Answers()
    rows = write_rows(tmp_path / "rows.jsonl", [f"row-{n}" for n in range(20)])
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url)
        finished(recorded)
        num_asked = len(answers.asked)
    replay = {"source": recorded.run_id, "mode": "cache"}
    asked = {"oversampling": {"rollouts_per_group": GROUP_SIZE + 2}, "num_process": "auto"}
    run = start(server, rows, engine.url, replay=replay, **asked)
    view = finished(run)
    assert "no engine answers" not in server.client.get(f"{run.path}/log").text
    assert len(answers.asked) == num_asked
    assert counts(view) == (20 * GROUP_SIZE, 0, 0)
    read_before, read = rows_of(recorded, 20), rows_of(run, 20)
    assert {uid: as_recorded(row) for uid, row in read.items()} == {
        uid: as_recorded(row) for uid, row in read_before.items()
    }


def test_a_step_takes_no_more_groups_than_it_needs(server: ServerProcess, tmp_path: Path) -> None:
    answers = Answers()
    rows = write_rows(tmp_path / "rows.jsonl", [f"row-{n}" for n in range(5)])
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url)
        finished(recorded)
    held = {"groups_per_step": 2, "leftover": "keep"}
    run = start(server, rows, engine.url, replay={"source": recorded.run_id, "mode": "cache"}, oversampling=held)

    def has_opened(num_groups: int) -> bool:
        return sum(run.view()["groups"].values()) == num_groups

    def is_paused_with(num_groups: int) -> bool:
        return run.view()["is_held"] and has_opened(num_groups)

    for step in (1, 2):
        poll_until(partial(is_paused_with, 2 * step))
        assert len(rows_of(run, 2)) == 2 * GROUP_SIZE
        reply = server.client.put(f"{run.path}/weight_version", json={"weight_version": step})
        assert reply.is_success, reply.text
        poll_until(partial(has_opened, min(2 * step + 2, 5)))
    assert counts(finished(run)) == (5 * GROUP_SIZE, 0, 0)


def test_a_missing_epoch_is_another_one_of_its_instance(server: ServerProcess, tmp_path: Path) -> None:
    answers = Answers()
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b"])
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url, num_epoch=2)
        finished(recorded)
        read_before = rows_of(recorded, 4)
        answers.forget()
        write_rows(rows, ["a", "b", "c"])
        run = start(
            server,
            rows,
            engine.url,
            num_epoch=4,
            replay={"source": recorded.run_id, "mode": "repeat", "ignore": ["input_file"]},
        )
        view = finished(run)
    assert answers.counted == {"c": 4 * GROUP_SIZE}
    assert counts(view) == (2 * 4 * GROUP_SIZE, 4 * GROUP_SIZE, 2 * 2 * GROUP_SIZE)
    stored = slots(run)
    assert len(stored) == 3 * 4 * GROUP_SIZE
    read = rows_of(run, 12)
    for group in run.groups():
        for sample in run.group(group["group_id"])["samples"]:
            row = read[sample["uid"]]
            if group["instance_id"] == "c":
                assert "replayed_from" not in row
                continue
            is_substitute = group["epoch"] > 1
            told = row["replayed_from"]
            assert told["run_id"] == recorded.run_id
            assert told["substitute"] is is_substitute
            # The largest smaller epoch: 1 stands for 2 and 3.
            source = read_before[told["uid"]]
            assert source["epoch"] == min(group["epoch"], 1)
            assert (row["epoch"], row["slot"]) == (group["epoch"], sample["slot"])
            assert {**as_recorded(row), "uid": 0, "epoch": 0, "rollout_id": 0} == {
                **as_recorded(source),
                "uid": 0,
                "epoch": 0,
                "rollout_id": 0,
            }
            own = rollout_uid(run.run_id, group["group_id"], sample["slot"])
            assert row["uid"] == (own if is_substitute else told["uid"])


def test_a_process_that_is_killed_half_way_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    names = [f"row-{n}" for n in range(12)]
    answers = Answers({name: ["broken"] for name in names[6:]})
    rows = write_rows(tmp_path / "rows.jsonl", names)
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url)
        finished(recorded)
        answers.forget()
    slow, gate = held(answers)
    with scripted(slow) as engine:
        run = start(server, rows, engine.url, replay={"source": recorded.run_id, "mode": "cache"})
        engine.wait_calls(4)
        poll_until(lambda: run.view()["samples"].get("member", 0) >= 6 * GROUP_SIZE)
        run_process_of(server).kill()
        gate.set()
        finished(run)
    stored = slots(run)
    assert len(stored) == 12 * GROUP_SIZE
    assert all(sample["reward"] is not None for sample in stored.values())
    recorded_uids = {sample["uid"] for sample in slots(recorded).values() if sample["reward"] is not None}
    assert len({sample["uid"] for sample in stored.values()} & recorded_uids) == 12 * GROUP_SIZE - 6
    assert Counter(run.view()["samples"])["surplus"] == 0


def test_a_recording_in_a_file_is_used_over_a_crash_of_the_server(
    make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_words(tmp_path / "tasks")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    answers, names = Answers({"row-0": ["broken"]}), [f"row-{n}" for n in range(8)]
    rows = write_rows(tmp_path / "rows.jsonl", names)
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url)
        finished(recorded)
    file = tmp_path / "words.fbr"
    assert forebay("recording", "export", recorded.run_id, file).code == 0
    answers.forget()
    slow, gate = held(answers)
    with scripted(slow) as engine:
        replay = {"source": str(file), "mode": "repeat"}
        run = start(server, rows, engine.url, replay=replay, num_epoch=2)
        engine.wait_calls(2)  # of both epochs, which lack the same slot
        server.kill9()
        gate.set()
        server.restart()
        finished(run)
    stored = slots(run)
    assert len(stored) == 2 * 8 * GROUP_SIZE
    assert all(sample["reward"] is not None for sample in stored.values())
    uids = {sample["uid"] for sample in stored.values()}
    assert len(uids) == len(stored)
    then = {sample["uid"] for sample in slots(recorded).values() if sample["reward"] is not None}
    assert then < uids
    # Nothing holds its source any more, so that it may go again.
    poll_until(lambda: str(file) not in open_files(server))
    kept = server.client.post("/v1/gc").json()["kept"]
    assert "source" not in kept


def open_files(server: ServerProcess) -> list[str]:
    found = []
    for each in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(each))
    return found


def test_a_recording_that_is_gone_by_now_fails_its_run(
    make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To its process that must neither look like the end of the run, nor like a group of which nothing is recorded."""
    write_words(tmp_path / "tasks")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60, max_restarts=0)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    answers, file = Answers({"row-0": ["broken"]}), tmp_path / "words.fbr"
    rows = write_rows(tmp_path / "rows.jsonl", ["row-0", "row-1"])
    with scripted(answers) as engine:
        recorded = start(server, rows, engine.url)
        finished(recorded)
    assert forebay("recording", "export", recorded.run_id, file).code == 0
    answers.forget()
    slow, gate = held(answers)
    with scripted(slow) as engine:
        run = start(server, rows, engine.url, replay={"source": str(file), "mode": "cache"})
        engine.wait_calls(1)
        server.kill9()
        file.unlink()
        gate.set()
        server.restart()
        reason = run.wait_for_state("failed")["reason"]
    assert "the recording that the run replays cannot be read any more" in reason
    assert answers.counted["row-1"] == 0


def test_the_recorded_code_judges_though_the_server_is_killed_at_its_start(
    make_server: MakeServer, tmp_path: Path
) -> None:
    write_words(tmp_path / "tasks")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    rows = write_rows(tmp_path / "rows.jsonl", ["a"])
    with scripted(Answers({"a": ["broken"]})) as engine:
        recorded = start(server, rows, engine.url)
        finished(recorded)
        write_words(tmp_path / "tasks", shift=100.0)
        run = start(server, rows, engine.url, replay={"source": recorded.run_id, "mode": "cache"})
        server.kill9()  # before its process is up, as a rule
        server.restart()
        finished(run)
    assert all(sample["reward"] is not None and sample["reward"] < 100 for sample in slots(run).values())


def test_no_prompt_goes_to_an_engine_that_only_a_file_names(
    make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever made it may not be who has the prompts."""
    write_words(tmp_path / "tasks")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60, max_restarts=0)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    there, here = Answers({"row-0": ["broken"]}), Answers()
    replay = {"source": str(tmp_path / "words.fbr"), "mode": "cache"}
    with scripted(there) as engine:
        recorded = start(server, write_rows(tmp_path / "rows.jsonl", ["row-0", "row-1"]), engine.url)
        finished(recorded)
        assert forebay("recording", "export", recorded.run_id, replay["source"]).code == 0
        there.forget()
        refused = server.client.post("/v1/runs", json={"replay": replay})
        error = assert_error(refused, 422, "invalid_input", field="remote_engine_url")
        assert error["message"].endswith("not taken over from the file: remote_engine_url")
        with scripted(here) as own:
            finished(start_replay(server, replay, remote_engine_url=own.url))
    assert (here.asked, there.asked) == (["row-0"], [])
