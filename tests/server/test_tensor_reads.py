"""Samples with token arrays: written as binary parts or as JSON, read as tensors or as JSON."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forebay.client.sample_writer.encode import SAMPLES_TYPE, encode_sample, join_samples
from forebay.core.safetensors_format import TENSORS_TYPE
from tests.conftest import MakeServer
from tests.kit import IDLE, Json, NativeRun, ServerProcess, assert_error, make_group, make_sample, write_generator

if TYPE_CHECKING:
    import torch  # seconds of loading, in workers that may run no test of it

ARRAYS = ("tokens", "logprobs", "loss_mask")

HOOKS = f"""{IDLE}
def filter_item(item, task_type):
    return item["tokens"][0] % 2 == 1 and isinstance(item["logprobs"], list)
"""


def token_group(instance_id: str, rewards: tuple[float, ...] = (0.0, 1.0), length: int = 3) -> list[Json]:
    """A group whose samples differ in their tokens; exact in float32."""
    group = make_group(instance_id, rewards)
    for number, sample in enumerate(group):
        sample["tokens"] = list(range(number, number + length))
        sample["logprobs"] = [-token / 8 for token in sample["tokens"]]
        sample["loss_mask"] = [token % 2 for token in sample["tokens"]]
    return group


def post(run: NativeRun, *bodies: bytes, content_type: str = SAMPLES_TYPE) -> httpx.Response:
    return run.client.post(f"{run.path}/samples", content=join_samples(bodies), headers={"Content-Type": content_type})


def write(run: NativeRun, *samples: Json) -> list[Json]:
    """Write samples as binary ones; each one's verdict."""
    response = post(run, *map(encode_sample, samples))
    assert response.status_code == 200, response.text
    results: list[Json] = response.json()["results"]
    return results


def read_tensors(run: NativeRun, **body: Any) -> tuple[dict[str, "torch.Tensor"], Json]:
    """The tensors of a batch, and the JSON of the rest."""
    import safetensors.torch

    response = run.client.post(f"{run.path}/batches", json=body, headers={"Accept": TENSORS_TYPE})
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == TENSORS_TYPE
    tensors = safetensors.torch.load(response.content)
    rest: Json = json.loads(bytes(tensors.pop("rest").tolist()))
    return tensors, rest


def release(run: NativeRun, batch: Json) -> None:
    response = run.client.post(f"{run.path}/batches/{batch['batch_id']}/release")
    assert response.status_code == 200, response.text


def with_rewards(group: list[Json], rewards: tuple[float, ...] = (-1.0, 1.0)) -> list[Json]:
    """What a reader gets of a group of two: the rewards normalised."""
    return [
        {**sample, "reward": pytest.approx(reward, abs=1e-5), "raw_reward": sample["reward"]}
        for sample, reward in zip(group, rewards, strict=True)
    ]


RUN = {"group_size": 2}


def test_a_binary_sample_is_read_as_json_with_lists(run: NativeRun) -> None:
    group = token_group("a")
    assert [verdict["outcome"] for verdict in write(run, *group)] == ["member", "member"]
    assert run.read(num_groups=1)["data"] == with_rewards(group)


def test_slimes_reader_gets_lists(server: ServerProcess) -> None:
    run = server.start_slime("tensors", group_size=2)
    group = token_group("a")
    write(run, *group)
    peeked = run.client.get(f"{run.prefix}/buffer/peek").json()["data"]["data"]
    assert peeked == group
    assert run.fetch()["data"]["data"] == with_rewards(group)


def test_samples_are_shown_as_what_they_mean(run: NativeRun) -> None:
    group = token_group("a")
    write(run, *group)
    group_id = run.groups()[0]["group_id"]
    shown = run.client.get(f"{run.path}/groups/{group_id}", params={"bodies": True}).json()["samples"]
    assert [sample["body"] for sample in shown] == group


def test_a_batch_as_tensors_is_the_json_batch_in_another_form(run: NativeRun) -> None:
    groups = [token_group("a", length=3), token_group("b", length=5), make_group("c", [0.0, 1.0])]
    write(run, *groups[0], *groups[2])
    run.write(*groups[1])  # born as JSON
    told = run.read(num_groups=3)
    release(run, told)
    tensors, rest = read_tensors(run, num_groups=3)
    assert rest["data"] == [{k: v for k, v in row.items() if k not in ARRAYS} for row in told["data"]]
    assert {*rest} == {*told}
    assert rest["meta_info"] == told["meta_info"]
    offsets = tensors["offsets"].tolist()
    for number, row in enumerate(told["data"]):
        for name in ARRAYS:
            assert tensors[name][offsets[number] : offsets[number + 1]].tolist() == row.get(name, [])
    assert tensors["rewards"].tolist() == [row["reward"] for row in told["data"]]
    assert tensors["raw_rewards"].tolist() == [row["raw_reward"] for row in told["data"]]
    assert tensors["group_index"].tolist() == [0, 0, 1, 1, 2, 2]
    assert tensors["has_logprobs"].tolist() == [int("tokens" in row) for row in told["data"]]
    dtypes = {name: str(tensors[name].dtype) for name in ARRAYS}
    assert dtypes == {"tokens": "torch.int32", "logprobs": "torch.float32", "loss_mask": "torch.uint8"}


def test_padding_repeats_the_arrays_of_a_repeated_sample(server: ServerProcess) -> None:
    run = server.start_slime("padded", group_size=4, min_valid_group_size_ratio="0.5", min_valid_item_size_ratio="0.5")
    group = token_group("a")
    write(run, *group)
    run.stop()
    tensors, rest = read_tensors(run, num_groups=1)
    uids = [row["uid"] for row in rest["data"]]
    tokens = {sample["uid"]: sample["tokens"] for sample in group}
    assert len(uids) == 4
    assert tensors["tokens"].reshape(4, 3).tolist() == [tokens[uid] for uid in uids]


def test_weight_versions_are_a_tensor(run: NativeRun) -> None:
    first, second = token_group("a")
    write(run, {**first, "weight_versions": [7, 3]}, second)
    tensors, _ = read_tensors(run, num_groups=1)
    assert tensors["weight_version"].tolist() == [3, -1]


def test_binary_and_json_samples_share_a_request_and_each_has_its_verdict(run: NativeRun) -> None:
    first, second = token_group("a")
    wrong = encode_sample({**token_group("b")[0], "loss_mask": [1]})
    bodies = [encode_sample(first), wrong, json.dumps(second).encode(), b"{}", encode_sample(first)]
    response = post(run, *bodies)
    assert response.status_code == 200
    verdicts = response.json()["results"]
    assert [verdict["status"] for verdict in verdicts] == [200, 422, 200, 422, 200]
    assert verdicts[1]["error"]["field"] == "loss_mask"
    assert verdicts[3]["error"]["field"] == "uid"
    assert verdicts[4]["duplicate"]
    assert run.read(num_groups=1)["data"] == with_rewards([first, second])


def test_a_request_that_is_cut_off_stores_nothing(run: NativeRun) -> None:
    body = join_samples(map(encode_sample, token_group("a")))
    headers = {"Content-Type": f"{SAMPLES_TYPE}; v=1"}
    response = run.client.post(f"{run.path}/samples", content=body[:-1], headers=headers)
    assert_error(response, 422, "invalid_input", "body")
    assert run.groups() == []


def test_binary_samples_are_not_for_slimes_own_route(server: ServerProcess) -> None:
    run = server.start_slime("refusing", group_size=2)
    body = encode_sample(token_group("a")[0])
    response = run.client.post(f"{run.prefix}/buffer/write", content=body)
    assert response.status_code == 422
    assert "not JSON" in response.json()["message"]


def test_what_was_acknowledged_is_there_after_a_kill(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    group = token_group("a")
    write(run, *group)
    server.kill9()
    server.restart()
    tensors, rest = read_tensors(run, num_groups=1)
    assert tensors["tokens"].tolist() == [*group[0]["tokens"], *group[1]["tokens"]]
    assert [row["uid"] for row in rest["data"]] == [sample["uid"] for sample in group]
    release(run, rest)
    assert run.read(num_groups=1)["data"] == with_rewards(group)


def test_a_users_hooks_see_lists(make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path, HOOKS.replace('"idle"', '"picky"'), "picky_generator.py")
    run = make_server(generators=tmp_path).start_run("picky", group_size=4, min_valid_item_size_ratio=0.5)
    write(run, *token_group("a", (0.0, 1.0, 0.0, 1.0)))
    tensors, rest = read_tensors(run, num_groups=1)
    assert {row["uid"] for row in rest["data"]} == {"a/1", "a/3"}
    offsets = tensors["offsets"].tolist()
    first = {tensors["tokens"][start].item() for start in offsets[:-1]}
    assert first == {1, 3}


@pytest.mark.parametrize("accept", ["*/*", "application/json", f"text/plain, {TENSORS_TYPE}x"])
def test_who_does_not_ask_for_tensors_gets_json(run: NativeRun, accept: str) -> None:
    write(run, *token_group("a"))
    response = run.client.post(f"{run.path}/batches", json={"num_groups": 1}, headers={"Accept": accept})
    assert response.headers["Content-Type"] == "application/json"
    assert len(response.json()["data"]) == 2


def test_a_read_that_cannot_be_satisfied_is_told_in_json(run: NativeRun) -> None:
    headers = {"Accept": f"application/json;q=0.5, {TENSORS_TYPE}"}
    response = run.client.post(f"{run.path}/batches", json={"num_groups": 1}, headers=headers)
    assert response.json()["batch_id"] is None


def test_a_repeated_request_is_the_same_batch_in_either_form(run: NativeRun) -> None:
    write(run, *token_group("a"))
    _, rest = read_tensors(run, num_groups=1, request_id="r")
    told = run.read(num_groups=1, request_id="r")
    assert told["batch_id"] == rest["batch_id"]
    tensors, again = read_tensors(run, num_groups=1, request_id="r")
    assert again == rest
    assert tensors["tokens"].tolist() == [token for row in told["data"] for token in row["tokens"]]


def test_arrays_that_are_no_arrays_stay_in_their_row(run: NativeRun) -> None:
    first = make_sample(uid="1", tokens=["a"], logprobs=[-1.0])
    second = make_sample(uid="2", reward=0.0, tokens=[1, 2], loss_mask=[1], logprobs=[-1.0, -2.0])
    run.write(first, second)
    tensors, rest = read_tensors(run, num_groups=1)
    assert tensors["offsets"].tolist() == [0, 0, 0]
    assert [row["tokens"] for row in rest["data"]] == [["a"], [1, 2]]
