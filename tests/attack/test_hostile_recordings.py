"""Recordings that somebody else made, to do harm: their rows and bodies pass what a write passes, or are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.records.rows import Location, StoredSample
from forebay.replay.recording import Recording
from forebay.replay.recording_export import RecordEncoder
from tests.attack.hostile_files import forebay_in_time
from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess, assert_error, make_sample
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    group_record,
    json_of,
    run_record,
    sample_record,
    with_reward_place,
)
from tests.replay.replay_kit import groups_of, read_all, start_replay, until_ended

BODIES = {
    "an array": b"[1,2,3]",
    "a number": b"17",
    "no JSON": b'{"uid":',
    "no UTF-8": b'{"uid":"\xff","instance_id":"task-2","messages":[],"reward":0.0}',
    "cut off arrays": b"\xf8FBS\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff\xff{}",
    "messages that are none": b'{"uid":"a","instance_id":"task-2","messages":3,"reward":0.0}',
}
FIELDS: dict[str, dict[str, Any]] = {
    "a reward behind its end": {"reward_start": 20, "reward_end": -8000},
    "a reward before the body": {"reward_start": -8000, "reward_end": 20},
    "a reward beyond the body": {"reward_start": 20, "reward_end": 1 << 40},
    "a reward in another place": {"reward_start": 1, "reward_end": 3},
    "another reward": {"reward": 0.5},
    "another uid": {"uid": "mine"},
    "a slot beyond all": {"slot": 1 << 40},
    "an unknown end": {"rollout_outcome": "??"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "another instance": {"instance_id": "task-3"},
    "an epoch below 0": {"epoch": -1},
    "an epoch beyond all": {"epoch": 1 << 63},
    "a part of its own": {"outcome": "leader"},
}
"""What no row may say: the whole file is refused."""


@pytest.fixture(scope="module")
def target(module_servers: MakeServer) -> Iterator[ServerProcess]:
    """A server with samples of another run in its journal."""
    server = module_servers()
    run = server.start_run(group_size=2, name="secret")
    for number in range(8):
        run.write({"uid": f"u{number}", "instance_id": f"i{number}", "messages": [], "reward": 1, "x": "SECRET" * 500})
    yield server
    assert server.client.get("/healthz").status_code == 200


def write_hostile(path: Path, body: bytes | None = None, **fields: Any) -> None:
    """Three groups of two samples; the first sample of the second is one that no write makes."""
    encoder = RecordEncoder(run_record())
    content = encoder.run()
    for number in (1, 2, 3):
        group = group_record(number)
        for slot in range(2):
            sample = sample_record(group, slot)
            is_hostile = number == 2 and slot == 0
            text = body if is_hostile and body is not None else json_of(sample)
            sample = sample if text is body else with_reward_place(sample, text)
            sample = msgspec.structs.replace(sample, **fields) if is_hostile else sample
            content += encoder.samples([StoredSample(sample, Location(0, 0, 0))], [text])
        content += encoder.group(group)
    path.write_bytes(content + encoder.end())


def check_refused(server: ServerProcess, path: Path) -> None:
    """The hostile group alone is refused, by every command and by a replay, whose trainer reads the others."""
    verified = forebay_in_time("recording", "verify", path, "--json")
    assert verified.returncode == 1, verified.stdout
    assert [damage["place"] for damage in json.loads(verified.stdout)["damage"]] == [
        f"group {group_record(2).group_id}"
    ]
    assert forebay_in_time("recording", "show", path).returncode == 0
    run = start_replay(server, str(path))
    view = until_ended(run)
    assert (view["state"], view["counts"]["replay_hits"], view["counts"]["replay_misses"]) == ("finished", 4, 2)
    assert groups_of(run)["task-2", 0]["reason"] == "unreadable"
    rows = [row for batch in read_all(run, size=1) for row in batch]
    assert {row["instance_id"] for row in rows} == {"task-1", "task-3"}
    assert "SECRET" not in json.dumps(rows)


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_that_no_write_takes_costs_its_group(target: ServerProcess, tmp_path: Path, kind: str) -> None:
    write_hostile(tmp_path / "a.fbr", BODIES[kind])
    check_refused(target, tmp_path / "a.fbr")


@pytest.mark.parametrize("kind", FIELDS)
def test_a_row_that_its_body_does_not_prove_costs_its_group(target: ServerProcess, tmp_path: Path, kind: str) -> None:
    write_hostile(tmp_path / "a.fbr", **FIELDS[kind])
    check_refused(target, tmp_path / "a.fbr")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_row_that_no_store_has_ends_the_recording(target: ServerProcess, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.fbr"
    write_hostile(path, **REFUSED[kind])
    for command in ("verify", "show"):
        assert forebay_in_time("recording", command, path).returncode == 1
    error = assert_error(target.client.post("/v1/runs", json={"replay": str(path)}), 507, "recording_damaged")
    assert "a.fbr: byte " in error["message"]


def test_no_body_is_longer_than_that_of_a_write(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(max_body_bytes=20_000)
    sample = sample_record(group_record(2), 0)
    write_hostile(tmp_path / "a.fbr", json_of(sample).replace(b'"text":', b'"pad":"%b","text":' % (b"x" * 20_000)))
    run = start_replay(server, str(tmp_path / "a.fbr"))
    assert until_ended(run)["counts"] == {"replay_hits": 4, "replay_misses": 2}
    assert groups_of(run)["task-2", 0]["reason"] == "unreadable"
    assert "more than 20,000" in server.log()


OWN_AFFAIRS: dict[str, Any] = {
    "judge_url": "http://evil.example/judge",
    "api_key": "sk-mine",
    "remote_engine_url": "http://evil.example:30000",
    "reward": {"models": [{"at": "evil.example:8000"}]},
    "judges": {"http://evil.example": 1.0},
    "proxies": ["10.0.0.1"],
    "verifier": {"hf_token": "mine"},
}


def test_addresses_and_keys_of_a_file_have_to_be_named_by_the_start(target: ServerProcess, tmp_path: Path) -> None:
    path, plain = tmp_path / "a.fbr", {"task_type": "idle", "group_size": 2, "num_epoch": 1, "column": "a: b, 12:30"}
    with RecordingWriter(path, run_record(payload={**plain, **OWN_AFFAIRS})) as writer:
        writer.add_group(group_record(1, num_samples=0))
    asked = {"source": str(path), "mode": "cache"}
    error = assert_error(target.client.post("/v1/runs", json={"replay": asked}), 422, "invalid_input", "api_key")
    assert error["message"].endswith(f"not taken over from the file: {', '.join(sorted(OWN_AFFAIRS))}")
    named = dict.fromkeys(OWN_AFFAIRS) | {"api_key": "sk-own"}
    del named["remote_engine_url"]  # which only what generates asks for
    run = start_replay(target, str(path), **named)
    until_ended(run)
    exported = forebay_in_time("recording", "export", run.run_id, tmp_path / "own.fbr", "--url", target.url)
    assert exported.returncode == 0, exported.stderr
    with Recording.open(tmp_path / "own.fbr") as recording:
        assert recording.run.payload["judge_url"] is None
        assert "evil" not in json.dumps(recording.run.payload)


def test_a_payload_that_no_start_may_have_is_refused(target: ServerProcess, tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(700):
        deep = {"x": deep}
    for payload, status in (({"column": "a\0b"}, 422), ({"deep": deep}, 507)):
        path = tmp_path / f"{next(iter(payload))}.fbr"
        encoder = RecordEncoder(run_record(payload={"task_type": "idle", "group_size": 2, **payload}))
        path.write_bytes(encoder.run() + encoder.group(group_record(1, num_samples=0)) + encoder.end())
        reply = target.client.post("/v1/runs", json={"replay": str(path)})
        assert reply.status_code == status, reply.text
        assert forebay_in_time("recording", "show", path).returncode == (status == 507)


TAKEN: list[Json] = [
    {"uid": "same", "reward": 1},
    {"uid": "same", "reward": 0},
    {"uid": "x" * 1_024},
    {"uid": "x" * 1_024, "reward": 0},
    {"uid": 7, "instance_id": 2.5},
    {"uid": "7", "instance_id": 2.5},
    {"reward": "nan", "error": ["odd"]},
    {"raw_reward": 0.5, "weight_versions": [3, "4", None]},
    {"epoch": "first", "slot": [1], "rollout_id": {"a": 1}, "fork": "z", "outcome": 3},
    {"status": "failed", "error": "x" * 100_000, "reward": ...},
]
"""Samples of generators that number and name as they like: slime's routes take all of them."""


def test_a_file_of_what_the_lenient_routes_took_is_whole(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server()
    run = server.start_slime("lenient", group_size=2)
    for fields in TAKEN:
        assert run.send(make_sample(**fields)).json()["success"]
    run.stop()
    exported = forebay_in_time("recording", "export", run.run_id, tmp_path / "a.fbr", "--url", server.url)
    assert exported.returncode == 0, exported.stderr
    verified = forebay_in_time("recording", "verify", tmp_path / "a.fbr")
    assert verified.returncode == 0, verified.stdout
