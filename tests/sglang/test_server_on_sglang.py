"""Server, run process and base generator against the real SGLang, directly and behind its router."""

import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.engines.tiny.model import ensure_model
from forebay.engines.tiny.recipe import question
from tests.conftest import MakeServer
from tests.e2e.conftest import TASKS
from tests.e2e.payloads import make_payload, numbered_rows
from tests.e2e.reading import Reader, check_account, run_process_of, start_as_slime
from tests.kit import ServerProcess, SlimeRun, poll_until
from tests.sglang.conftest import engine_with

pytestmark = pytest.mark.sglang

NUM_ROWS = 30
LIMIT_S = 180.0
"""For what takes 20 s on two idle cores."""
DEADLINE_S = 8
IDLE_S = 6.0
GROUP_SIZE = 4
ADDRESSES = ["sglang_url", "sglang_router_url"]


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = shutil.copytree(TASKS, tmp_path_factory.mktemp("tasks") / "tasks")
    # A killed run process would be started again, and the engine be busy again.
    return module_servers(generators=Path(folder), start_wait_s=60, max_restarts=0)


@pytest.fixture(params=ADDRESSES)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def wait_load(engine_url: str, is_idle: bool, within_s: float) -> float:
    """Seconds until the engine is idle, or busy."""
    began_s = time.monotonic()

    def is_so() -> bool:
        ranks = httpx.get(f"{engine_url}/v1/loads", timeout=30).json()["loads"]
        return is_idle is not any(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks)

    poll_until(is_so, within_s)
    return time.monotonic() - began_s


def start_hanging(server: ServerProcess, folder: Path, url: str, sglang_url: str, **changes: Any) -> SlimeRun:
    """A run with one group that would never end; returns when the others are complete and the engine works for it."""
    rows = [{"instance_id": "hanging", "prompt": "go on", "hangs": True}, *numbered_rows(3)]
    payload = make_payload(folder, url, rows, num_repeat_per_sample=str(GROUP_SIZE))
    run = start_as_slime(server, payload | changes)
    poll_until(lambda: run.view()["samples"].get("member") == 3 * GROUP_SIZE, LIMIT_S)
    wait_load(sglang_url, is_idle=False, within_s=IDLE_S)
    return run


def test_a_run_on_sglang_delivers_its_groups(server: ServerProcess, url: str, tmp_path: Path) -> None:
    run = start_as_slime(server, make_payload(tmp_path, url, numbered_rows(NUM_ROWS)))
    reader = Reader(server)
    reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, NUM_ROWS)
    assert view["groups"]["acked"] >= 0.9 * NUM_ROWS
    assert set(view["discarded"]) <= {"invalid"}
    assert all(row["extra_info"]["finish_reason"] in ("length", "stop") for row in reader.rows)


def test_a_hanging_group_is_closed_at_its_deadline_and_leaves_the_engine_idle(
    server: ServerProcess, url: str, sglang_url: str, tmp_path: Path
) -> None:
    run = start_hanging(server, tmp_path, url, sglang_url, group_deadline_seconds=DEADLINE_S)
    (timed_out,) = poll_until(lambda: [g for g in run.groups() if g["reason"] == "timed_out"], 2 * DEADLINE_S)
    wait_load(sglang_url, is_idle=True, within_s=IDLE_S)
    assert timed_out["instance_id"] == "hanging"
    assert DEADLINE_S <= timed_out["closed_s"] - timed_out["opened_s"] < 2 * DEADLINE_S
    reader = Reader(server)
    reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, 4, GROUP_SIZE)
    assert view["discarded"]["timed_out"] == 1
    assert view["state"] == "finished"


def test_a_stopped_run_leaves_the_engine_idle(server: ServerProcess, url: str, sglang_url: str, tmp_path: Path) -> None:
    run = start_hanging(server, tmp_path, url, sglang_url)
    assert run.stop()["state"] == "stopped"
    wait_load(sglang_url, is_idle=True, within_s=IDLE_S)


def test_a_killed_run_process_leaves_the_engine_idle(
    server: ServerProcess, url: str, sglang_url: str, tmp_path: Path
) -> None:
    run = start_hanging(server, tmp_path, url, sglang_url)
    run_process_of(server).kill()
    wait_load(sglang_url, is_idle=True, within_s=IDLE_S)
    run.wait_for_state("failed")


def test_calls_of_before_a_killed_server_are_not_in_the_way_of_those_after(
    server: ServerProcess, url: str, sglang_url: str, tmp_path: Path
) -> None:
    run = start_hanging(server, tmp_path, url, sglang_url)
    server.kill9()
    server.restart()
    run_process_of(server)
    log = lambda: "\n".join(run.client.get(f"{run.path}/log", params={"lines": 1_000}).json()["lines"])  # noqa: E731
    poll_until(lambda: log().count("1 epochs of") == 2)
    wait_load(sglang_url, is_idle=False, within_s=LIMIT_S)
    run.stop()
    wait_load(sglang_url, is_idle=True, within_s=IDLE_S)
    assert "Duplicate request ID" not in log()


def test_the_model_of_the_tiny_engine_runs_the_math_task_on_sglang(
    server: ServerProcess, sglang_python: str, tmp_path: Path
) -> None:
    rows = [{"instance_id": n, "prompt": question(n % 9 + 1, n // 9 + 1), "label": str(n % 9 + n // 9 + 2)}
            for n in range(18)]  # fmt: skip
    with engine_with(sglang_python, ensure_model(), tmp_path / "engine.log") as url:
        run = start_as_slime(server, make_payload(tmp_path, url, rows, task_type="math"))
        reader = Reader(server)
        reader.read_to_the_end(LIMIT_S)
    view = check_account(run, reader, len(rows))
    assert view["groups"]["acked"] > 0
    assert set(view["discarded"]) <= {"invalid"}
    assert {row["raw_reward"] for row in reader.rows} == {0.0, 1.0}
