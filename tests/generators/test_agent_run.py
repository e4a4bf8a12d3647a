"""One agent, without a server: what it is given, and what becomes of it when it fails or takes too long."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import EngineError
from forebay.generators.agents.gateway import RolloutRecord
from forebay.generators.agents.rollouts import checked_result
from forebay.generators.agents.run import Agent, run_agent
from forebay.generators.agents.task import AgentResult, AgentTask
from forebay.generators.buffer_link.abc import Step
from forebay.generators.failures import AgentFailed, EnvironmentFailed
from forebay.generators.rollouts.open_group import StepBarrier
from forebay.generators.sandbox import Limits, Sandbox

LIMITS = Limits(wall_s=30)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox() as sandbox:
        yield sandbox


def task_in(folder: Path) -> AgentTask:
    return AgentTask(
        instance_id="one",
        row={"prompt": "2+2?", "level": 3},
        prompt=[{"role": "user", "content": "2+2?"}],
        model="tiny",
        base_url="http://gateway/gateway/r/v1",
        anthropic_url="http://gateway/gateway/r/anthropic",
        api_key="the-key",
        folder=folder,
        timeout_s=30,
    )


async def ran(agent: Agent, sandbox: Sandbox, limits: Limits = LIMITS, hold: StepBarrier | None = None) -> Any:
    return (await run_agent(agent, task_in(sandbox.folder), sandbox, limits, hold or StepBarrier())).output


async def test_a_program_is_given_its_task(sandbox: Sandbox) -> None:
    told = await ran('env; cat "$FOREBAY_INSTANCE" > copy.json; pwd', sandbox)
    lines = set(told.splitlines())
    assert {
        "OPENAI_BASE_URL=http://gateway/gateway/r/v1",
        "OPENAI_API_KEY=the-key",
        "ANTHROPIC_BASE_URL=http://gateway/gateway/r/anthropic",
        "ANTHROPIC_API_KEY=the-key",
        "FOREBAY_MODEL=tiny",
        str(sandbox.folder),
    } <= lines
    assert json.loads((sandbox.folder / "copy.json").read_text()) == {
        "instance_id": "one",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "level": 3,
    }


@pytest.mark.parametrize("status", [0, 3])
async def test_the_last_64_kib_of_what_a_program_printed_are_kept(sandbox: Sandbox, status: int) -> None:
    kept: list[str] = []
    command = f"head -c 100000 /dev/zero | tr '\\0' a; echo end >&2; exit {status}"
    running = run_agent(command, task_in(sandbox.folder), sandbox, Limits(wall_s=60), StepBarrier(), kept.append)
    if status:
        with pytest.raises(AgentFailed, match="ended with status 3"):
            await running
    else:
        assert "[…" in (await running).output, "the output has both ends, as it had"
    (printed,) = kept
    assert len(printed) == 65_536
    assert printed.count("a") == 65_536 - len("end\n")


async def test_what_takes_too_long_is_stopped(sandbox: Sandbox) -> None:
    hangs = asyncio.Event()
    never = threading.Event()

    async def agent(task: AgentTask) -> None:
        await hangs.wait()

    for slow in (agent, lambda _: never.wait(10)):
        with pytest.raises(AgentFailed, match=r"took longer than 0\.05 s"):
            await ran(slow, sandbox, Limits(wall_s=0.05))
    never.set()
    with pytest.raises(AgentFailed, match=r"was killed after 5 s: stuck here"):
        await ran("echo stuck here; sleep 1000", sandbox, Limits(wall_s=5))


async def wait_for_ever(_: AgentTask) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("agent", [wait_for_ever, "sleep 1000"])
async def test_its_time_stands_still_while_engines_are_paused(sandbox: Sandbox, agent: Agent) -> None:
    hold = StepBarrier()
    hold.note_paused(True)
    running = asyncio.create_task(ran(agent, sandbox, Limits(wall_s=0.1), hold))
    done, _ = await asyncio.wait([running], timeout=0.4)
    assert not done
    hold.note_paused(False)
    with pytest.raises(AgentFailed, match=r"0\.1 s"):
        await running


async def test_its_time_stands_still_while_its_run_is_held(sandbox: Sandbox) -> None:
    hold = StepBarrier(groups_per_step=1)
    running = asyncio.create_task(ran(wait_for_ever, sandbox, Limits(wall_s=0.1), hold))
    hold.note_complete("group")
    done, _ = await asyncio.wait([running], timeout=0.4)
    assert not done
    hold.note_step(Step(1))
    with pytest.raises(AgentFailed, match=r"took longer than 0\.1 s"):
        await running


async def test_a_timeout_of_the_agents_own_is_its_own(sandbox: Sandbox) -> None:
    async def agent(task: AgentTask) -> None:
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"):
        await ran(agent, sandbox)


def test_a_task_does_not_show_its_key(tmp_path: Path) -> None:
    assert "the-key" not in repr(task_in(tmp_path))


ENGINE = {"kind": "engine", "status": 503, "message": "gone"}
AGENT = {"kind": "agent", "status": 400, "message": "too long"}
SAMPLES: list[dict[str, Any]] = [{"messages": []}]


@pytest.mark.parametrize(
    ("failures", "samples", "error", "kind"),
    [
        ([], SAMPLES, ValueError("x"), AgentFailed),
        ([ENGINE], SAMPLES, ValueError("x"), EngineError),
        ([ENGINE, AGENT], SAMPLES, ValueError("x"), AgentFailed),
        ([ENGINE], [], None, EngineError),
        ([AGENT], [], None, AgentFailed),
        ([], [], None, AgentFailed),
        ([], SAMPLES, EnvironmentFailed("x"), EnvironmentFailed),
    ],
)
def test_whose_fault_it_is(failures: Any, samples: Any, error: Any, kind: type[Exception], tmp_path: Path) -> None:
    result = None if error else AgentResult(output="", wall_s=1.0, folder=tmp_path)
    with pytest.raises(kind):
        checked_result(RolloutRecord(samples=samples, failures=failures), result, error)


def test_an_agent_that_ends_well_is_fine(tmp_path: Path) -> None:
    result = AgentResult(output="", wall_s=1.0, folder=tmp_path)
    assert checked_result(RolloutRecord(samples=SAMPLES, failures=[ENGINE]), result, None) is result
