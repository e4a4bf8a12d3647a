"""What slime takes of any generator, Forebay takes too: uids that come again, rewards below 0, words of its own."""

import json

import pytest

from tests.conftest import MakeServer
from tests.kit import Json, SlimeRun, make_sample

GROUP_SIZE = 4


def item(instance: str, slot: int, turn: int, **fields: object) -> Json:
    """A sample of a generator that numbers its samples alike in every pass."""
    text = f"{instance} in pass {turn}"
    return make_sample(
        uid=f"{instance}-{slot}",
        instance_id=instance,
        reward=slot % 2,
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}],
        **fields,
    )


def write_pass(run: SlimeRun, turn: int) -> list[bool]:
    """Write the samples of one pass over two instances; which were duplicates."""
    samples = [item(instance, slot, turn) for instance in "ab" for slot in range(GROUP_SIZE)]
    return [run.send(sample).json()["duplicate"] for sample in samples]


def test_the_same_uid_with_another_body_is_another_sample(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_slime("passes", group_size=GROUP_SIZE)
    passes = [write_pass(run, turn) for turn in range(2)]
    again = [write_pass(run, turn) for turn in range(2)]
    server.kill9()
    server.restart()
    again += [write_pass(run, turn) for turn in range(2)]
    passes.append(write_pass(run, 2))
    assert [any(duplicates) for duplicates in passes] == [False, False, False]
    assert all(all(duplicates) for duplicates in again), "the same body is the same sample, also after a kill"
    rows = [row for _ in range(3) for row in run.fetch()["data"]["data"]]
    texts = sorted(row["messages"][1]["content"] for row in rows)
    assert texts == sorted(f"{name} in pass {turn}" for name in "ab" for turn in range(3) for _ in range(GROUP_SIZE))
    assert {row["uid"] for row in rows} == {f"{name}-{slot}" for name in "ab" for slot in range(GROUP_SIZE)}


@pytest.mark.parametrize("settings", [{}, {"capture": "false"}], ids=str)
def test_the_same_text_of_other_tokens_is_another_sample(make_server: MakeServer, settings: Json) -> None:
    run = make_server().start_slime("tokens", group_size=GROUP_SIZE, **settings)
    samples = [item("a", 0, 0, tokens=[1, 2], logprobs=[-0.5, logprob]) for logprob in (-0.25, -0.75)]
    bodies = [json.dumps(sample, indent=indent).encode() for indent in (None, 2) for sample in samples]
    told = [run.client.post(f"{run.prefix}/buffer/write", content=body).json()["duplicate"] for body in bodies]
    assert told == [False, False, True, True]


@pytest.mark.parametrize("content", [b"1e999", b"[" * 900 + b"]" * 900], ids=["huge", "deep"])
def test_bodies_that_not_every_reader_takes_are_compared_too(make_server: MakeServer, content: bytes) -> None:
    run = make_server().start_slime("odd", group_size=GROUP_SIZE)
    bodies = [json.dumps(item("a", 0, turn) | {"odd": "ODD"}).encode().replace(b'"ODD"', content) for turn in (0, 1)]
    path = f"{run.prefix}/buffer/write"
    told = [run.client.post(path, content=body).json()["duplicate"] for body in (*bodies, *bodies)]
    assert told == [False, False, True, True]


def test_samples_outside_the_range_of_rewards_raise_the_alarm(make_server: MakeServer) -> None:
    run = make_server().start_slime("signs", group_size=GROUP_SIZE)
    for number in range(24):
        for slot in range(GROUP_SIZE):
            assert run.send(make_sample(instance_id=number, reward=-1.0 if slot == 0 else 1.0)).status_code == 200
    rows = run.fetch()["data"]["data"]
    assert {row["raw_reward"] for row in rows} == {1.0}, "none of the others is delivered"
    alarm = run.view()["alarm"]
    assert alarm["reasons"]["out_of_range"] == 24
    told = "24 of 96 samples of ready groups are left out: their rewards are within [-1, 1], reward_range is [0, 1]"
    assert told in alarm["message"]


def test_a_status_of_its_own_beside_a_reward_is_left_to_the_generator(make_server: MakeServer) -> None:
    run = make_server().start_slime("failed", group_size=GROUP_SIZE)
    for slot in range(GROUP_SIZE):
        run.send(item("a", slot, 0, status="failed" if slot % 2 else "done"))
    run.send(make_sample(instance_id="b", status="failed", reward=None))
    rows = run.fetch()["data"]["data"]
    assert sorted(row["reward"] for row in rows) == pytest.approx([-1, -1, 1, 1], abs=1e-6)
    assert [row["status"] for row in rows] == ["done", "failed", "done", "failed"]
    [group] = [group for group in run.groups() if group["instance_id"] == "b"]
    assert (group["num_samples"], group["num_failed"]) == (1, 1)
