"""``template_path`` of a start: checked before the reply, and used by the run process behind a router."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.client import AsyncBufferClient
from forebay.engines.capture.checking import check
from forebay.engines.scripted import ScriptedEngine
from tests.conftest import MakeServer
from tests.engines.template_kit import hiding_router, write_tokenizer
from tests.kit import ServerProcess, assert_error, write_generator

TASK = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "talk"
def reward_func(item):
    return len(item["messages"][-1]["content"]) / 100
def run_rollout(data):
    BaseGenerator.from_payload(data).entry(data["input_file"], single_turn, reward_func)
"""


@pytest.fixture(scope="module")
def talk_server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    write_generator(folder, TASK, "talk_generator.py")
    return module_servers(generators=folder, start_wait_s=60)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"instance_id": "a", "prompt": "say it"}) + "\n")
    return path


def _no_template(folder: Path) -> object:
    return str(write_tokenizer(folder, has_template=False))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: str(folder / "missing"), "is not a folder"),
        (str, "has no tokenizer"),
        (_no_template, "has no chat template"),
        (lambda _: 7, "must be the path of a folder"),
        (lambda _: "", "must be the path of a folder"),
        (lambda _: "a\0b", "template_path contains a NUL byte"),
        (lambda _: "x" * 5_000, "is not a folder"),
    ],
    ids=["missing", "empty folder", "no template", "number", "empty", "null byte", "long"],
)
def test_a_folder_that_will_not_do_is_a_422_of_the_start(
    talk_server: ServerProcess, tmp_path: Path, rows: Path, make: Callable[[Path], object], told: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    body = {"task_type": "talk", "group_size": 2, "input_file": str(rows), "template_path": make(folder)}
    for path in ("/v1/runs", "/s/wrong/start_rollout"):
        answer = talk_server.client.post(path, json={**body, "num_repeat_per_sample": "2"})
        assert told in assert_error(answer, 422, "invalid_input", "template_path")["message"]


def test_slimes_tokenizer_path_is_a_path_of_the_trainers_machine_and_refuses_nothing(
    talk_server: ServerProcess, rows: Path
) -> None:
    run = talk_server.start_slime("trainer", task_type="talk", input_file=str(rows), tokenizer_path="/only/there")
    assert run.view()["state"] in ("validating", "running")
    run.stop()


def test_it_must_lie_under_the_allowed_folders(make_server: MakeServer, tmp_path: Path, rows: Path) -> None:
    tasks, allowed = tmp_path / "tasks", tmp_path / "allowed"
    tasks.mkdir()
    write_generator(tasks, TASK, "talk_generator.py")
    folder = write_tokenizer(tmp_path / "model")
    server = make_server(generators=tasks, input_roots=allowed, start_wait_s=60)
    body = {"task_type": "talk", "group_size": 2, "input_file": str(rows), "template_path": str(folder)}
    assert_error(server.client.post("/v1/runs", json=body), 400, "input_refused", "template_path")


async def test_samples_of_a_run_behind_a_router_that_hides_its_workers_are_exact(
    talk_server: ServerProcess, tmp_path: Path, rows: Path
) -> None:
    folder, answers = write_tokenizer(tmp_path / "model"), iter(["answer", "another answer"])
    async with (
        ScriptedEngine(lambda _: next(answers)) as engine,
        hiding_router(engine.url, url="http://127.0.0.1:1") as (router, url),
        AsyncBufferClient(talk_server.url) as client,
        asyncio.timeout(60),
    ):
        await client.start("talk", 2, rows, remote_engine_url=url, template_path=str(folder))
        batch = await client.read(num_groups=1, wait_s=50)
        assert batch is not None
        checks = [await check(engine.url, dict(row)) for row in batch.rows]
    assert router.asked == ["/generate"] * 2
    assert [row.get("retokenized") for row in batch.rows] == [None, None]
    assert all(check.num_tokens > len("answer") and check.max_delta < 1e-9 for check in checks)
