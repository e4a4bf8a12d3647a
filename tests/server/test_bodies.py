"""One sample's stored bytes, the texts of its tokens, and an instance's groups over the epochs."""

import httpx
import pytest

from forebay.client.sample_writer.encode import SAMPLES_TYPE, join_samples
from forebay.core.binary_sample import pack
from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, NativeRun, ServerProcess, assert_error, damage, make_group, make_sample

UID = "a/../b?x=1&y"


def body_of(run: NativeRun, uid: str, name: str = "body") -> httpx.Response:
    [group] = run.groups()
    return run.client.get(f"{run.path}/groups/{group['group_id']}/{name}", params={"uid": uid})


def test_a_body_comes_as_it_was_written_whatever_its_uid_is(server: ServerProcess) -> None:
    run = server.start_run(group_size=3)
    text = b'{"uid": "%s", "instance_id": 1, "messages": [], "reward": 1.50, "x": 1e999}' % UID.encode()
    binary = pack(b'{"uid": "b", "instance_id": 1, "messages": [], "reward": 2}', b"\1\0\0\0")
    assert run.client.post(f"{run.path}/samples", content=text).status_code == 200
    headers = {"content-type": SAMPLES_TYPE}
    run.client.post(f"{run.path}/samples", content=join_samples([binary]), headers=headers).raise_for_status()
    reply = body_of(run, UID)
    assert reply.content == text
    assert reply.headers["content-disposition"] == "attachment"
    assert body_of(run, "b").content == binary
    assert_error(body_of(run, "c"), 404, "not_found")


def test_a_damaged_body_has_an_error_of_its_own(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    run.write(make_sample(uid="a", note="to-be-damaged"))
    damage(server.data_dir, b"to-be-damaged")
    assert_error(body_of(run, "a"), 507, "body_unreadable")


def test_the_engine_of_the_run_decodes_each_token_alone(server: ServerProcess) -> None:
    with ScriptedEngine(lambda _: "").in_thread() as engine:
        run = server.start_run(remote_engine_url=engine.url)
        told = httpx.post(f"{engine.url}/tokenize", json={"prompt": "ab b"}, timeout=TIME_LIMIT_S)
        tokens = told.json()["tokens"]
        run.write(make_sample(uid="with", tokens=tokens), make_sample(uid="without"))
        texts = body_of(run, "with", "token_texts").json()["texts"]
        assert "".join(texts[str(token)] for token in tokens) == "ab b"
        assert_error(body_of(run, "without", "token_texts"), 422, "invalid_input", "uid")
    assert_error(body_of(run, "with", "token_texts"), 503, "engine_unavailable")
    without = server.start_run()
    without.write(make_sample(uid="a", tokens=[1]))
    error = assert_error(body_of(without, "a", "token_texts"), 422, "invalid_input", "remote_engine_url")
    assert "names no engine" in error["message"]


@pytest.mark.parametrize("instance_id", [7, "7"])
def test_an_instances_groups_are_listed_over_its_epochs_with_step_and_rewards(
    server: ServerProcess, instance_id: int | str
) -> None:
    run = server.start_run(group_size=2)
    for epoch, rewards in enumerate([(0.0, 1.0), (1.0, 2.0), (None, 3.0)]):
        failed = {"status": "failed", "error": {"type": "E", "message": "m"}, "reward": ...}
        run.write(
            *(
                make_sample(
                    uid=f"{epoch}/{slot}",
                    instance_id=instance_id,
                    epoch=epoch,
                    slot=slot,
                    **({"reward": reward} if reward is not None else failed),
                )
                for slot, reward in enumerate(rewards)
            )
        )
    run.write(*make_group("other", [1.0]))
    run.take(num_groups=1, step=5)
    group_id = next(group["group_id"] for group in run.groups() if group["instance_id"] == instance_id)
    shown = run.client.get(f"{run.path}/groups/{group_id}/epochs").json()["groups"]
    assert [(each["epoch"], each["state"], each["step"], each["rewards"]) for each in shown] == [
        (0, "acked", 5, [0.0, 1.0]),
        (1, "ready", None, [1.0, 2.0]),
        (2, "discarded", 5, [3.0]),  # the batch reported it
    ]
    assert_error(run.client.get(f"{run.path}/groups/none/epochs"), 404, "group_not_found")
