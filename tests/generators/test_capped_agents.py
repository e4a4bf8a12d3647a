"""Agents with a cap, by a real server and gateway: at it the agent is ended, and another one begins elsewhere."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.conftest import MakeServer
from tests.generators.agent_kit import Samples, start, stored
from tests.generators.capping_kit import install_capping
from tests.kit import NativeRun, ServerProcess, write_generator

CAP = 8
AGENTS = '''
import asyncio
import sys

from openai import AsyncOpenAI

from forebay.generators.agent import AgentGenerator, Limits

TASK_TYPE = "capped"
PROGRAM = """
import openai, time
client = openai.OpenAI(max_retries=0)
try:
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "program"}])
    print(reply.choices[0].message.content)
except openai.APIError:
    time.sleep(600)
"""


async def functions(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    async def ask(*more, **params):
        reply = await client.chat.completions.create(model="m", messages=[*task.prompt, *more], **params)
        return reply.choices[0].message.content
    if task.instance_id == "stubborn":  # does not take an error for its end
        try:
            return await ask()
        except Exception:
            await asyncio.sleep(600)
    first = await ask(max_tokens=4)
    try:
        return await ask({"role": "assistant", "content": first}, {"role": "user", "content": "on"})
    except Exception:
        return "an answer all the same"


async def reward(item):
    return 0.5


def run_rollout(data):
    agent = {"functions": functions, "program": [sys.executable, "-c", PROGRAM]}
    generator = AgentGenerator.from_payload(data)
    generator.run_agent(data["input_file"], agent[data["kind"]], reward, limits=Limits(wall_s=60))
'''


class Capped:
    """Runs of each kind of agent, all on two engines: they begin at the first, and run again at the second."""

    def __init__(self, server: ServerProcess, folder: Path, first: ThreadedEngine, second: ThreadedEngine) -> None:
        self.engines = first, second
        options = {"caps": {"0": CAP}, "first_at": first.url, "again_at": second.url}
        engines = f"{first.url},{second.url}"
        self.runs: dict[str, NativeRun] = {}
        for kind, names in (("functions", ["stubborn", "content"]), ("program", ["program"])):
            (folder / kind).mkdir()
            scheduler = {"policy": "capping", "options": options}
            rows = [{"do": name} for name in names]
            self.runs[kind] = start(
                server, folder / kind, "capped", engines, rows, kind=kind, max_attempts=1, scheduler=scheduler
            )

    def limits(self, place: int, name: str) -> list[int | None]:
        """What the calls of an agent were bounded by, at one of the engines."""
        asked = (call for call in self.engines[place].calls if name in call.messages[0]["content"])
        return [call.limit for call in asked]


@pytest.fixture(scope="module")
def capped(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Capped]:
    folder = tmp_path_factory.mktemp("capped")

    def script(call: ScriptedCall) -> str:
        return "one two three 3"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        server = module_servers(env=install_capping(folder / "site"), start_wait_s=60)
    write_generator(server.generators, AGENTS, "capped_generator.py")
    with ScriptedEngine(script).in_thread() as first, ScriptedEngine(script).in_thread() as second:
        yield Capped(server, folder, first, second)


@pytest.fixture(scope="module")
def samples(capped: Capped) -> Samples:
    return stored(capped.runs["functions"]) | stored(capped.runs["program"])


@pytest.mark.parametrize("name", ["stubborn", "program"])
def test_an_agent_at_its_cap_is_ended_and_another_begins_where_it_is_sent(
    capped: Capped, samples: Samples, name: str
) -> None:
    (sample,) = samples[name]
    assert (capped.limits(0, name), capped.limits(1, name)) == ([CAP], [64])
    assert (sample["status"], sample["messages"][-1]["content"]) == ("completed", "one two three 3")


def test_an_agent_that_goes_on_after_its_cap_makes_no_sample_of_it(capped: Capped, samples: Samples) -> None:
    (sample,) = samples["content"]
    assert (capped.limits(0, "content"), capped.limits(1, "content")) == ([4, CAP - 4], [4, 64])
    assert sample["messages"][-1]["content"] == "one two three 3"


def test_broken_agents_are_counted_and_have_not_failed(capped: Capped, samples: Samples) -> None:
    assert samples
    for run, number in ((capped.runs["functions"], 2), (capped.runs["program"], 1)):
        counts = run.view()["counts"]
        assert (counts["rollouts_broken"], counts["tokens_broken"]) == (number, number * CAP)
        assert counts["rollouts_finished"] == number
        assert "rollouts_failed" not in counts
