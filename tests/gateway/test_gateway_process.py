"""The gateway as the server runs it: a process of its own, started when needed, restarted when it crashes."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from typer.testing import CliRunner

from forebay.core.child_process import child_environment
from forebay.core.settings import Settings
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from forebay.generators.agents.gateway import GatewayLink
from forebay.generators.agents.rollouts import AgentRollouts
from forebay.generators.agents.task import AgentTask
from forebay.generators.sandbox import Limits
from forebay.server.cli.command_line import app as cli
from forebay.server.gateway_process import GatewayProcess
from tests.conftest import MakeServer
from tests.gateway.gateway_kit import USER, Json, assert_whole
from tests.generators.bench_kit import LIMIT_S, bench
from tests.kit import (
    TIME_LIMIT_S,
    NativeRun,
    ServerProcess,
    assert_error,
    children_with,
    make_sample,
    poll_until,
    write_generator,
)
from tests.lent import lend_runs, lent_url

TELLS = """
import json, threading
TASK_TYPE = "tells"
def run_rollout(data):
    print(json.dumps({name: data[name] for name in ("remote_engine_url", "remote_buffer_url")}))
    threading.Event().wait()
"""
PLAIN = Path(__file__).parents[1] / "slime" / "tasks" / "plain_generator.py"
HANGING = "hang"
AGENT_S = 6.0
"""Enough for an agent to begin, and to end, on a busy machine."""


def script(call: ScriptedCall) -> Reply:
    """Numbers, and for one prompt nothing."""
    return Reply(text=str(call.number), hang=call.prompt == HANGING)


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(script).in_thread() as engine:
        yield engine


def make_tasks(folder: Path) -> Path:
    write_generator(folder, TELLS, "tells_generator.py")
    write_generator(folder, PLAIN.read_text(), PLAIN.name)
    return folder


@pytest.fixture(scope="module")
def server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    return module_servers(generators=make_tasks(tmp_path_factory.mktemp("tasks")), start_wait_s=60)


def told_to(run: NativeRun) -> Json:
    """What the run process was given, printed by itself; the newest."""

    def last() -> Json:
        lines = run.client.get(f"{run.path}/log").json()["lines"]
        return next((json.loads(line) for line in reversed(lines) if line.startswith("{")), {})

    return poll_until(last)


def start(server: ServerProcess, engine: ThreadedEngine, **payload: Any) -> tuple[NativeRun, Json]:
    run = server.start_run("tells", remote_engine_url=engine.url, **payload)
    return run, told_to(run)


def admitted(told: Json) -> Json:
    """The gateway's address and the run's key."""
    reply = httpx.post(f"{told['remote_buffer_url']}/gateway", timeout=30)
    assert reply.status_code == 200, reply.text
    answer: Json = reply.json()
    return answer


def opened(gateway: Json, rollout_id: str = "r", **fields: Any) -> Json:
    body = {"rollout_id": rollout_id, "deadline_s": 60, **fields}
    reply = httpx.post(f"{gateway['url']}/gateway/rollouts", json=body, headers=bearer(gateway), timeout=30)
    assert reply.status_code == 201, reply.text
    answer: Json = reply.json()
    return answer


def bearer(told: Json) -> dict[str, str]:
    return {"Authorization": f"Bearer {told['key']}"}


def chat(rollout: Json, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [USER], **fields}
    return httpx.post(f"{rollout['base_url']}/chat/completions", json=body, headers=bearer(rollout), timeout=30)


def gateway_pids(server: ServerProcess) -> list[int]:
    return [child.pid for child in children_with(server.pid, "forebay.gateway")]


def test_a_run_opens_rollouts_at_the_gateway(server: ServerProcess, engine: ThreadedEngine) -> None:
    run, told = start(server, engine)
    gateway = admitted(told)
    assert gateway == admitted(told)
    rollout = opened(gateway)
    assert chat(rollout).status_code == 200
    close = f"{gateway['url']}/gateway/rollouts/r/close"
    (sample,) = httpx.post(close, headers=bearer(gateway), timeout=TIME_LIMIT_S).json()["samples"]
    assert_whole(sample)
    run.stop()


def test_a_run_started_with_the_flag_restores_reasoning(server: ServerProcess, engine: ThreadedEngine) -> None:
    said = ["--task-type", "tells", "--engine-url", engine.url, "--group-size", "1", "--restore-reasoning"]
    started = CliRunner().invoke(cli, ["start", *said, "--url", server.url])
    assert started.exit_code == 0, started.output
    run = NativeRun(server, started.output.split()[0])
    gateway = admitted(told_to(run))
    rollout = opened(gateway)
    chat(rollout, messages=[USER, {"role": "assistant", "content": "of the agent's own"}, USER])
    close = f"{gateway['url']}/gateway/rollouts/r/close"
    assert httpx.post(close, headers=bearer(gateway), timeout=TIME_LIMIT_S).json()["counters"]["unrestored"] == 1
    run.stop()


def test_a_stopped_run_has_no_keys_and_no_calls_any_more(server: ServerProcess, engine: ThreadedEngine) -> None:
    run, told = start(server, engine)
    gateway = admitted(told)
    rollout = opened(gateway)
    hanging = {"messages": [{"role": "user", "content": HANGING}]}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(chat, rollout, **hanging)
        engine.wait_in_flight(1)
        run.stop()
        assert call.result().status_code == 410
    engine.wait_in_flight(0)
    assert chat(rollout).status_code == 401
    refused = httpx.post(f"{gateway['url']}/gateway/rollouts", json={}, headers=bearer(gateway), timeout=TIME_LIMIT_S)
    assert_error(refused, 401, "unauthorized")
    assert_error(httpx.post(f"{told['remote_buffer_url']}/gateway", timeout=TIME_LIMIT_S), 410, "run_ended")


def test_a_run_without_engines_is_told(server: ServerProcess) -> None:
    run = server.start_run("tells", remote_engine_url="")
    reply = httpx.post(f"{told_to(run)['remote_buffer_url']}/gateway", timeout=TIME_LIMIT_S)
    assert_error(reply, 422, "invalid_input", "remote_engine_url")
    assert_error(server.client.post("/w/no-run/gateway"), 404, "run_not_found")


def test_a_captured_generator_gets_its_tokens_without_knowing(
    server: ServerProcess, engine: ThreadedEngine, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"instance_id": "row-{n}", "prompt": "row {n}"}}\n' for n in range(4)))
    limits = {"num_process": "4", "num_epoch": "1", "skip_instance_ids": []}
    run = server.start_run("plain", 2, capture=True, input_file=str(rows), remote_engine_url=engine.url, **limits)
    poll_until(lambda: run.view()["samples"].get("member") == 8)
    batch = run.take(num_groups=1, wait_s=20)
    for sample in batch["data"]:
        assert_whole(sample)
        assert sample["messages"][-1]["content"] == sample["extra_info"]["answer"]
    assert poll_until(lambda: run.view()["counts"].get("capture_matched") == 8)
    assert run.view()["counts"].get("capture_unmatched", 0) == 0


def test_the_deadline_of_a_group_reaches_the_calls_of_a_captured_generator(
    server: ServerProcess, engine: ThreadedEngine, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"instance_id": "a", "prompt": "{HANGING}"}}\n')
    run, told = start(server, engine, capture="true", input_file=str(rows), group_timeout_seconds=1)
    assert told["remote_engine_url"] == told["remote_buffer_url"]
    hanging = {"messages": [{"role": "user", "content": HANGING}]}
    with ThreadPoolExecutor(1) as pool:
        url = f"{told['remote_engine_url']}/v1/chat/completions"
        call = pool.submit(httpx.post, url, json=hanging, timeout=30)
        engine.wait_in_flight(1)
        run.write(make_sample(instance_id="a"))
        assert call.result().json()["choices"][0]["finish_reason"] == "abort"
    engine.wait_in_flight(0)
    assert [group["reason"] for group in run.closed()] == ["timed_out"]
    run.stop()
    assert httpx.post(url, json={"messages": [USER]}, timeout=TIME_LIMIT_S).status_code == 401


@pytest.mark.parametrize("why", ["paused", "held"])
def test_a_rollouts_deadline_stands_still_while_those_of_its_run_do(
    server: ServerProcess, engine: ThreadedEngine, why: str
) -> None:
    run, told = start(server, engine)
    gateway = admitted(told)
    stand_still(run, told, why, True)
    rollout = opened(gateway, deadline_s=6)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(chat, rollout, messages=[{"role": "user", "content": HANGING}])
        with pytest.raises(TimeoutError):
            call.result(timeout=7)
        stand_still(run, told, why, False)
        assert call.result().status_code == 410
    run.stop()


def aborted_once(call: ScriptedCall) -> Reply:
    """Hangs until it is aborted; the rest comes at once."""
    return Reply(text=f" {call.number}") if call.said else Reply(text="begun", hang=True)


async def asking_agent(task: AgentTask) -> str | None:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(model=task.model, messages=[USER])
    return reply.choices[0].message.content


async def test_a_pause_longer_than_an_agents_limit_costs_no_agent(server: ServerProcess, tmp_path: Path) -> None:
    await asyncio.to_thread(lend_runs, server)

    async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
        url = await asyncio.to_thread(lent_url, server, client.rollout.run_id)
        async with GatewayLink(url) as gateway:
            rollouts = AgentRollouts(gateway, asking_agent, Limits(wall_s=AGENT_S), {}, frozenset())
            return await rollouts.run(client, messages, params)

    async with bench(server, tmp_path, aborted_once, rollout, "a") as run:
        await run.engine.wait_in_flight(2, timeout_s=LIMIT_S)
        async with httpx.AsyncClient(base_url=f"{server.url}/v1/runs/{run.client.run_id}", timeout=30) as http:
            await http.post("/engines/pause", json={"mode": "abort"})
            assert await run.client.read(num_groups=1, wait_s=1.2 * AGENT_S) is None
            await http.post("/engines/continue", json={"weight_version": 1})
        rows = await run.read(1)
    assert [(row["outcome"], row["attempt"]) for row in rows] == [("ok", 0)] * 2
    assert all(row["messages"][-1]["content"].startswith("begun ") for row in rows)


def stand_still(run: NativeRun, told: Json, why: str, is_still: bool) -> None:
    """As a trainer does it, or a run process whose step has all its groups."""
    if why == "held":
        reply = httpx.post(f"{told['remote_buffer_url']}/progress", json={"held": is_still}, timeout=30)
    else:
        reply = run.client.post(f"{run.path}/engines/{'pause' if is_still else 'continue'}", json={})
    assert reply.is_success, reply.text


def test_a_gateway_that_is_killed_is_followed_by_another_at_the_same_address(
    server: ServerProcess, engine: ThreadedEngine
) -> None:
    run, told = start(server, engine, capture=True)
    other, address = start(server, engine)
    gateway = admitted(address)
    rollout = opened(gateway)
    (killed,) = gateway_pids(server)
    os.kill(killed, signal.SIGKILL)
    captured = httpx.post(f"{told['remote_engine_url']}/v1/chat/completions", json={"messages": [USER]}, timeout=30)
    assert captured.status_code == 200, "the run is known to the next gateway from its start"
    assert gateway_pids(server) != [killed]
    assert chat(rollout).status_code == 401, "a rollout's record is gone, and its key with it"
    assert gateway == admitted(address)
    assert chat(opened(gateway)).status_code == 200
    for each in (run, other):
        each.stop()


@pytest.mark.soak
def test_the_gateway_dies_with_its_server(make_server: MakeServer, engine: ThreadedEngine, tmp_path: Path) -> None:
    server = make_server(generators=make_tasks(tmp_path / "tasks"), start_wait_s=60)
    assert gateway_pids(server) == [], "without need there is none"
    _, told = start(server, engine, capture=True)
    (pid,) = gateway_pids(server)
    server.kill9()
    poll_until(lambda: not psutil.pid_exists(pid))
    server.restart()
    (run,) = server.client.get("/v1/runs").json()["runs"]
    again = poll_until(lambda: _told_anew(NativeRun(server, run["run_id"]), told))
    url = f"{again['remote_engine_url']}/v1/chat/completions"
    assert httpx.post(url, json={"messages": [USER]}, timeout=TIME_LIMIT_S).status_code == 200
    secret = told["remote_engine_url"].rpartition("/")[2]
    assert again["remote_engine_url"].endswith(f"/gateway/{secret}"), "only the port may be another one"


def _told_anew(run: NativeRun, before: Json) -> Json:
    lines = [line for line in run.client.get(f"{run.path}/log").json()["lines"] if line.startswith("{")]
    return json.loads(lines[-1]) if len(lines) > 1 else {}


def test_the_ending_of_the_engines_address_is_kept(server: ServerProcess, engine: ThreadedEngine) -> None:
    run = server.start_run("tells", remote_engine_url=f"{engine.url}/v1", capture=True)
    assert told_to(run)["remote_engine_url"].endswith("/v1")
    run.stop()


async def test_a_gateway_that_cannot_be_started_just_now_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[OSError] = []

    def child_environment_once_failing(environment: Mapping[str, str]) -> dict[str, str]:
        if not failed:
            failed.append(BlockingIOError("fork: resource temporarily unavailable"))
            raise failed[0]
        return child_environment(environment)

    monkeypatch.setattr("forebay.core.processes.child_link.child_environment", child_environment_once_failing)
    async with GatewayProcess(Settings(port=0)) as gateway, httpx.AsyncClient(timeout=30) as http:
        assert (await http.get(f"{gateway.start()}/gateway/healthz")).status_code == 200
    assert failed


def test_what_the_gateway_left_out_stands_in_the_status_of_the_run_and_in_the_metrics(
    server: ServerProcess, engine: ThreadedEngine
) -> None:
    run, told = start(server, engine)
    rollout = opened(admitted(told))
    asked = {"model": "m", "input": "hi", "client_metadata": {"a": "b"}, "tools": [{"type": "web_search"}]}
    for _ in range(2):
        reply = httpx.post(f"{rollout['base_url']}/responses", json=asked, headers=bearer(rollout), timeout=30)
        assert reply.status_code == 200, reply.text
    noted = {"left_out_responses_client_metadata": 2, "left_out_responses_tool_web_search": 2}
    # The run's own process counts at the same time, under an id of its own.
    own = {"process_id": "run", "counts": {"rollouts_finished": 3}}
    for _ in range(2):
        httpx.post(f"{told['remote_buffer_url']}/progress", json=own, timeout=30).raise_for_status()
        poll_until(lambda: run.view()["counts"] == {**noted, "rollouts_finished": 3})
    metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert [line for line in metrics.splitlines() if "left_out_responses_tool_web_search" in line]
    httpx.post(f"{rollout['base_url']}/responses", json={**asked, "colour": "red"}, headers=bearer(rollout), timeout=30)
    poll_until(lambda: run.view()["counts"].get("left_out_responses_colour") == 1)
    run.stop()
