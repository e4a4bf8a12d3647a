"""What a run is warned of by its samples: no token ids, and calls to other models. On an engine, to its trainer."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.client import BufferClient
from forebay.engines.scripted import ScriptedEngine
from forebay.engines.scripted.tokens import decode
from tests.attack.hostile_engine import healthy_chat, hostile_engine
from tests.cli.conftest import Forebay, forebay  # noqa: F401 - a fixture
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, poll_until, write_generator

JUDGED = """
from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "judged"
VERDICT = [{"role": "user", "content": "good?"}]

def in_thread(client, messages, params):
    ask = client.chat.completions.create
    reply = ask(model="custom", messages=messages)
    "".join(chunk.choices[0].delta.content or "" for chunk in ask(model="judge", messages=VERDICT, stream=True))
    ask(model="custom", messages=VERDICT, extra_body={"lora_path": "critic"})
    for stream in (False, True):
        left_out = ask(model="grader", messages=VERDICT, stream=stream, extra_headers={"X-Forebay-Record": "false"})
        list(left_out)
    return [*messages, reply.choices[0].message], "stop"

def reward(item):
    return float(item["uid"][-1])

def run_rollout(data):
    function = in_thread if data.get("is_judged") else single_turn
    BaseGenerator.from_payload(data).entry(data["input_file"], function, reward)
"""
NO_TOKENS, SEVERAL = "samples arrive without token ids", "rollouts request several models or an adapter"


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    server = module_servers()
    write_generator(server.generators, JUDGED, "judged_generator.py")
    return server


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    """The address of an engine that is not SGLang, and returns no token ids."""
    chat = healthy_chat()
    choice = {name: chat["choices"][0][name] for name in ("index", "message", "finish_reason")}
    body = {name: value for name, value in chat.items() if name != "metadata"} | {"choices": [choice]}
    with hostile_engine(is_sglang=False, bodies={"plain": json.dumps(body).encode()}) as engine:
        yield engine.url


def finished(server: ServerProcess, tmp_path: Path, engine_url: str, **fields: Any) -> NativeRun:
    """A run of one group of two rollouts, of which the second gets the better reward."""
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"instance_id": "a", "prompt": "do: plain"}))
    run = server.start_run("judged", 2, input_file=str(path), remote_engine_url=engine_url, **fields)
    run.wait_for_state("finished")
    return run


def rows_of(run: NativeRun) -> list[Json]:
    (group,) = run.groups()
    reply = run.client.get(f"{run.path}/groups/{group['group_id']}", params={"bodies": True})
    return [sample["body"] for sample in reply.json()["samples"]]


def trained(row: Json) -> str:
    return decode(token for token, bit in zip(row["tokens"], row["loss_mask"], strict=True) if bit)


def test_samples_without_tokens_are_warned_about_in_status_and_at_the_read(
    server: ServerProcess,
    tmp_path: Path,
    vllm: str,
    forebay: Forebay,  # noqa: F811 - the fixture
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "forebay.client")
    run = finished(server, tmp_path, vllm)
    (warning,) = run.view()["warnings"]
    assert warning.startswith(NO_TOKENS)
    assert " ".join(warning.split()) in " ".join(forebay("status", run.run_id, "--url", server.url).out.split())
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1, wait_s=0)
    assert batch is not None
    assert batch.meta_info["warning"] == warning
    assert warning in caplog.text
    assert poll_until(server.log).count(warning) == 1


def test_who_starts_without_capture_is_not_warned(server: ServerProcess, tmp_path: Path, vllm: str) -> None:
    run = finished(server, tmp_path, vllm, capture=False)
    assert all(row["retokenized"] for row in rows_of(run))
    assert run.view()["warnings"] == []


def test_calls_of_a_rollout_to_other_models_are_warned_about(server: ServerProcess, tmp_path: Path) -> None:
    with ScriptedEngine(lambda call: "good" if call.prompt == "good?" else "4").in_thread() as engine:
        run = finished(server, tmp_path, engine.url, is_judged=True)
        plain = finished(server, tmp_path, engine.url, model="custom")
    (warning,) = run.view()["warnings"]
    assert warning.startswith(SEVERAL)
    assert "requested 'custom', 'judge', 'custom:critic')" in warning
    assert sorted(map(trained, rows_of(run))) == ["4", "4", "good", "good", "good", "good"]
    assert run.view()["counts"]["capture_left_out"] == 4
    assert plain.view()["warnings"] == []
    assert all(row["token_spans"][-1]["model"] == "custom" for row in rows_of(plain))


def test_with_policy_models_only_their_tokens_are_trained_on(server: ServerProcess, tmp_path: Path) -> None:
    with ScriptedEngine(lambda call: "good" if call.prompt == "good?" else "4").in_thread() as engine:
        run = finished(server, tmp_path, engine.url, is_judged=True, policy_models=["custom"])
        wrong = finished(server, tmp_path, engine.url, is_judged=True, policy_models=["costum"])
    assert list(map(trained, rows_of(run))) == ["4", "4"]
    assert (run.view()["warnings"], run.view()["counts"]["capture_other_models"]) == ([], 4)
    (warning,) = wrong.view()["warnings"]
    assert warning.startswith("rollouts request no model in policy_models")
    assert list(map(trained, rows_of(wrong))) == ["", ""]
