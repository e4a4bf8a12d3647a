"""A run of a real server in a file: what it has, what it never has, and what is refused."""

import json
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest

from forebay.core.binary_sample import SAMPLES_TYPE, join_samples, pack
from forebay.core.errors import ForebayError
from forebay.replay.recording import Recording
from forebay.replay.recording_export import NewRecording, RecordEncoder
from forebay.replay.recording_secrets import without_secrets
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, Json, NativeRun, ServerProcess, assert_error, make_group, make_sample, poll_until
from tests.replay.recordings.recording_kit import run_record

__all__ = ["forebay"]

SEGMENT_BYTES = 65_536


@pytest.fixture
def server(make_server: MakeServer, forebay: Forebay, monkeypatch: pytest.MonkeyPatch) -> ServerProcess:
    # `forebay` first: it takes the address away.
    server = make_server(segment_bytes=SEGMENT_BYTES, replay_bytes=0)
    monkeypatch.setenv("FOREBAY_URL", server.url)
    return server


def train(run: NativeRun, *steps: int, num_groups: int = 2, text: str = "") -> None:
    """For each step, so many groups that are written and delivered."""
    for step in steps:
        for number in range(num_groups):
            run.write(*make_group(f"{step}.{number}", [0.0, 1.0], extra_info={"text": text}))
        batch = run.read(num_groups=num_groups, step=step)
        run.ack(batch)


def exported(forebay: Forebay, run: NativeRun, path: Path, *flags: str) -> Path:
    outcome = forebay("recording", "export", run.run_id, path, *flags)
    assert (outcome.code, outcome.out.strip()) == (0, str(path)), outcome
    return path


def bodies_of(recording: Recording) -> dict[str, bytes]:
    samples = [sample for group in recording.groups() for sample in recording.samples(group.group_id)]
    return {sample.row.uid: recording.body(sample) for sample in samples}


def shown(run: NativeRun, group_id: str) -> list[Json]:
    samples: list[Json] = run.client.get(f"{run.path}/groups/{group_id}", params={"bodies": True}).json()["samples"]
    return samples


def test_a_run_is_exported_with_everything_it_has(server: ServerProcess, forebay: Forebay, tmp_path: Path) -> None:
    run = server.start_run(group_size=2, name="sums", group_timeout_seconds=300, temperature=0.7)
    train(run, 1, 2)
    binary = pack(
        msgspec.json.encode(make_sample(uid="b/0", instance_id="b", reward=0.5, messages=[])),
        bytes(range(40)),
        bytes(40),
    )
    sent = join_samples([binary, json.dumps(make_sample(uid="b/1", instance_id="b", text="é")).encode()])
    reply = run.client.post(f"{run.path}/samples", content=sent, headers={"Content-Type": SAMPLES_TYPE})
    assert reply.status_code == 200, reply.text
    run.write(*make_group("failed", [None, None], status="failed", error="lost"))
    run.write(make_sample(instance_id="b", uid="surplus", epoch=0), make_sample(instance_id="1.0", uid="late", epoch=0))
    path = exported(forebay, run, tmp_path / "a.fbr")
    with Recording.open(path) as recording:
        assert recording.verify() == []
        groups = {group["group_id"]: group for group in run.groups()}
        assert [group.group_id for group in recording.groups()] == list(groups)
        assert [(g.state, g.reason) for g in recording.groups()] == [
            (groups[g.group_id]["state"], groups[g.group_id]["reason"] or "") for g in recording.groups()
        ]
        bodies = bodies_of(recording)
        assert bodies["b/0"] == binary
        for group_id in groups:
            found = shown(run, group_id)
            assert [each.row.uid for each in recording.samples(group_id)] == [each["uid"] for each in found]
            for each in found:
                assert each["uid"] == "b/0" or json.loads(bodies[each["uid"]]) == each["body"]
        became = Counter(each.row.outcome for group_id in groups for each in recording.samples(group_id))
        assert became == {"member": 12, "surplus": 1, "late": 1}
        assert [(batch.number, batch.step, len(batch.group_ids)) for batch in recording.batches()] == [
            (1, 1, 2),
            (2, 2, 2),
        ]
        assert (recording.run.name, recording.run.payload["temperature"]) == ("sums", 0.7)
    run.stop()


def test_steps_choose_what_is_exported(server: ServerProcess, forebay: Forebay, tmp_path: Path) -> None:
    run = server.start_run(group_size=2)
    train(run, 10, 11, 12)
    path = exported(forebay, run, tmp_path / "a.fbr", "--steps", "10,12")
    with Recording.open(path) as recording:
        assert [group.instance_id for group in recording.groups()] == ["10.0", "10.1", "12.0", "12.1"]
        assert [group.instance_id for group in recording.groups("12")] == ["12.0", "12.1"]
        assert recording.made.steps == "10,12"
        assert recording.verify() == []
    for steps, code, text in [("9-12", 2, "step 9 is not recorded: recorded"), ("x", 2, "neither a step nor")]:
        outcome = forebay("recording", "export", run.run_id, tmp_path / "b.fbr", "--steps", steps)
        assert (outcome.code, text in outcome.err) == (code, True), outcome
    assert_error(run.client.get(f"{run.path}/recording?steps=9"), 404, "not_recorded", "steps")
    assert_error(run.client.get(f"{run.path}/recording?steps=x"), 422, "invalid_input", "steps")
    assert sorted(each.name for each in tmp_path.glob("*.fbr*")) == ["a.fbr"]
    run.stop()


def test_bodies_that_are_gone_are_told_with_the_steps_that_are_left(
    server: ServerProcess, forebay: Forebay, tmp_path: Path
) -> None:
    run = server.start_run(group_size=2, keep_checkpoints=1)
    for step in range(1, 5):
        train(run, step, num_groups=8, text="x" * 8_000)
        run.checkpoint(step)
    poll_until(
        lambda: (
            run.client.post("/v1/gc").json() and not all(s["has_body"] for s in shown(run, run.groups()[0]["group_id"]))
        )
    )
    error = assert_error(run.client.get(f"{run.path}/recording"), 409, "bodies_gone")
    left = error["hint"].partition("still complete: ")[2]
    assert left.endswith("4")
    outcome = forebay("recording", "export", run.run_id, tmp_path / "a.fbr")
    assert outcome.code == 1
    assert left in outcome.err
    with Recording.open(exported(forebay, run, tmp_path / "a.fbr", "--steps", left)) as recording:
        assert recording.verify() == []
        assert recording.made.num_samples == 2 * len(recording.groups()) >= 16
    run.stop()


def test_what_is_secret_is_in_no_file(server: ServerProcess, forebay: Forebay, tmp_path: Path) -> None:
    login = "http://me:s3cret-login@127.0.0.1:1"
    run = server.start_run(
        group_size=1,
        remote_engine_url=f"{login},{login}/v1?api_key=s3cret-query&a=b",
        api_key="s3cret-key",
        judge={"api_key": "s3cret-judge", "urls": [login], "headers": {"Authorization": "Bearer s3cret-header"}},
        HF_TOKEN="s3cret-token",
        judgeApiKeys=["s3cret-camel"],
        session_token="s3cret-session",
        eos_token="</s>",
        max_tokens=5,
    )
    run.write(make_sample())
    path = exported(forebay, run, tmp_path / "a.fbr")
    with Recording.open(path) as recording:
        payload = recording.run.payload
    assert payload["remote_engine_url"] == "http://127.0.0.1:1,http://127.0.0.1:1/v1?api_key=&a=b"
    assert payload["judge"] == {"urls": ["http://127.0.0.1:1"], "headers": {}}
    assert (payload["max_tokens"], payload["eos_token"]) == (5, "</s>")
    document = json.dumps(msgspec.to_builtins(without_secrets(run_record(reason=f"no answer at {login}"))))
    assert b"s3cret" not in path.read_bytes() + run.client.get(f"{run.path}/recording").content + document.encode()
    run.stop()


def test_what_a_newcomer_gets_wrong(server: ServerProcess, forebay: Forebay, tmp_path: Path) -> None:
    run = server.start_run(name="sums")
    mine = tmp_path / "a.fbr"
    mine.write_text("mine")
    for arguments, code, text in [
        (["export", run.run_id, mine], 2, "exists"),
        (["export", "sms", tmp_path / "b.fbr"], 1, "sums"),
        (["export", run.run_id, tmp_path / "none" / "b.fbr"], 2, "there is no folder"),
        (["show", mine], 1, "a.fbr is not a recording"),
        (["show", tmp_path / "c.fbr"], 1, "there is no recording"),
        (["verify", tmp_path], 1, "there is no recording"),
        (["diff", mine, run.run_id], 1, "a.fbr is not a recording"),
        (["diff", "sms", run.run_id], 1, "sums"),
    ]:
        outcome = forebay("recording", *arguments)
        assert outcome.code == code, outcome
        assert text in outcome.err, outcome
    assert mine.read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir() if "fbr" in each.name] == ["a.fbr"]
    assert_error(server.client.get("/v1/runs/none/recording"), 404, "run_not_found")
    run.stop()


def write_all(content: bytes, path: Path) -> None:
    """As it comes: in pieces that are no records."""
    with NewRecording(path) as new:
        for at in range(0, len(content), 7):
            new.write(content[at : at + 7])


def test_a_reply_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    encoder = RecordEncoder(run_record())
    head = encoder.run()
    failed = encoder.end(ForebayError("a body is gone", hint="check the disk"))
    for content, text in [(head, "cut off"), (head + failed, "a body is gone"), (b"[]" * 100, "is not a recording")]:
        with pytest.raises(ForebayError, match=text):
            write_all(content, tmp_path / "a.fbr")
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_can_be_exported_meanwhile(server: ServerProcess, tmp_path: Path) -> None:
    run = server.start_run(group_size=2)
    train(run, 1)
    run.write(make_sample(instance_id="open", uid="open"))
    with (
        httpx.stream("GET", f"{server.url}{run.path}/recording", timeout=TIME_LIMIT_S) as reply,
        NewRecording(tmp_path / "a.fbr") as new,
    ):
        for piece in reply.iter_bytes():
            new.write(piece)
    with Recording.open(tmp_path / "a.fbr") as recording:
        assert recording.groups()[-1].state == "open"
        assert [each.row.uid for each in recording.samples(recording.groups()[-1].group_id)] == ["open"]
        assert recording.verify() == []
    run.stop()
