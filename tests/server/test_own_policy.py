"""A policy of somebody else's package, as a user installs it: the one in examples/policy."""

import asyncio
import json
import os
import tomllib
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.kit import assert_error, poll_until, write_generator

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy"
TASK = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "ordered"
async def reward(item):
    return 1.0
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward)
"""
PROMPTS = ["three words long", "one", "two words", "none of these is as long"]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a server in which the example is installed, as by pip."""
    site = tmp_path / "site"
    info = site / "forebay_short_prompts-0.1.0.dist-info"
    info.mkdir(parents=True)
    module = "forebay_short_prompts.py"
    (site / module).write_text((EXAMPLE / module).read_text())
    named = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]["forebay.policies"]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forebay-short-prompts\nVersion: 0.1.0\n")
    points = "".join(f"{name} = {target}\n" for name, target in named.items())
    (info / "entry_points.txt").write_text(f"[forebay.policies]\n{points}")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize("is_reversed", [False, True])
async def test_an_installed_policy_orders_a_run(
    make_server: MakeServer, tmp_path: Path, installed: dict[str, str], is_reversed: bool
) -> None:
    server = make_server(env=installed, start_wait_s=60)
    write_generator(server.generators, TASK, "ordered_generator.py")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instance_id": text, "prompt": text}) + "\n" for text in PROMPTS))
    scheduler = {"policy": "short-prompts", "options": {"is_reversed": is_reversed}}
    async with ScriptedEngine(lambda _: "done") as engine:
        payload = {"remote_engine_url": engine.url, "num_process": 1, "scheduler": scheduler}
        run = await asyncio.to_thread(server.start_run, "ordered", 1, input_file=str(rows), **payload)
        view = await asyncio.to_thread(run.wait_for_state, "finished")
    asked = [call.messages[-1]["content"] for call in engine.calls]
    assert asked == sorted(PROMPTS, key=len, reverse=is_reversed)
    assert view["scheduler"]["policy"] == "short-prompts"
    assert view["scheduler"]["options"] == {"is_reversed": is_reversed}


def test_what_a_policy_refuses_ends_its_run_and_is_told(
    make_server: MakeServer, tmp_path: Path, installed: dict[str, str]
) -> None:
    server = make_server(env=installed, start_wait_s=60, max_restarts=0)
    write_generator(server.generators, TASK, "ordered_generator.py")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q"}\n')
    payload = {"input_file": str(tmp_path / "rows.jsonl"), "remote_engine_url": "http://127.0.0.1:9"}
    scheduler = {"policy": "short-prompts", "options": {"is_reversed": 3}}
    run = server.start_run("ordered", 1, scheduler=scheduler, **payload)
    assert "is_reversed must be true or false" in poll_until(lambda: run.wait_for_state("failed")["reason"])
    body = {"task_type": "ordered", "group_size": 1, "scheduler": {"policy": "shortest"}, **payload}
    error = assert_error(server.client.post("/v1/runs", json=body), 422, "invalid_input", "scheduler.policy")
    assert "short-prompts" in error["hint"]
