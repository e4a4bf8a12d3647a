"""``python -m tests.passes.files_passed``: the files of the product that four requests pass, and how many they are.

The processes are real ones, in which ``sitecustomize.py`` beside this file takes notes. Counted is each file of which a
function is entered, in any thread of the one process that is looked at:

- a write of one sample, and a read of one group, over slime's routes: in the server, from the request until ``AFTER_S``
  after its reply, and in a tick of the timer;
- a rollout with one chat: in the run process, while the base generator passes over a file of one row, groups of one;
- a gateway chat: in the gateway, likewise.

Before each request goes one of its kind. Of several, what most of them pass is taken, so that one that a busy machine
delays makes no difference. Nothing that is done to start a process counts, nor what is imported.
"""

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Self

import httpx
import psutil

from forebay.engines.scripted import ScriptedEngine
from tests.kit import Json, ServerProcess, make_sample, poll_until, write_generator

LIMIT_S = 30.0
TICK_S = 0.6
"""More than twice what the server's timer waits."""
AFTER_S = 0.005
"""Within it, what goes on after a reply is done."""
REST_S = 0.1
"""Within it, the index of the journal is brought up to date: files that only this enters are counted apart."""
NUM_TIMES = 7
PASSES = """
import json, pathlib, sitecustomize, threading
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "passes"

async def reward(item):
    return 1.0

def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    sitecustomize.begin()
    generator.entry(data["input_file"], single_turn, reward)
    story = {"files": sitecustomize.passed(), "url": data["remote_buffer_url"]}
    print("story", json.dumps(story), flush=True)
    threading.Event().wait()
"""
"""A generator that tells what it passed, and then keeps its run alive."""


@dataclass
class Passed:
    """What is entered for a request, and what only later on its behalf."""

    files: set[str]
    later: set[str]

    @classmethod
    def by_most(cls, records: Sequence[Sequence[list[str]]]) -> Self:
        """What most of several requests enter, until they are over and in all."""
        until, in_all = map(_most, zip(*records, strict=True))
        return cls(until, in_all - until)

    def with_tick(self, tick: set[str]) -> Self:
        """The same with what a timer enters meanwhile."""
        return replace(self, files=self.files | tick, later=self.later - tick)


def _most(records: Sequence[list[str]]) -> set[str]:
    counts = Counter(file for files in records for file in files)
    return {file for file, count in counts.items() if count > len(records) / 2}


class Watched:
    """A server, and those that it starts, taking notes."""

    def __init__(self, folder: Path) -> None:
        self._sockets = folder / "sockets"
        self._sockets.mkdir()
        path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.server = ServerProcess(folder / "server", env={"PYTHONPATH": path, "FILES_PASSED": str(self._sockets)})
        write_generator(self.server.generators, PASSES, "passes_generator.py")

    def passed(self, pid: int, request: Callable[[], object]) -> Passed:
        """The files that process ``pid`` enters for a request, after one that was not looked at."""
        request()
        time.sleep(REST_S)
        self._ask(pid, 0)
        return Passed.by_most([self._passed_once(pid, request) for _ in range(NUM_TIMES)])

    def tick(self) -> set[str]:
        """The files that the server enters for its timer."""
        self._ask(self.server.pid, 0)
        time.sleep(TICK_S)
        return set(self._ask(self.server.pid, 0)[1])

    def _passed_once(self, pid: int, request: Callable[[], object]) -> Sequence[list[str]]:
        request()
        until_s = time.monotonic() + AFTER_S
        time.sleep(REST_S)
        return self._ask(pid, until_s)

    def _ask(self, pid: int, until_s: float) -> Sequence[list[str]]:
        """What was entered until then, and in all; at once the process begins anew."""
        with Client(str(self._sockets / str(pid))) as connection:
            connection.send(until_s)
            files: Sequence[list[str]] = connection.recv()
        return files

    def listening_on(self, url: str) -> int:
        """The child of the server that has the socket of ``url``."""
        port = int(url.rpartition(":")[2])
        children = psutil.Process(self.server.pid).children()
        return next(each.pid for each in children if any(at.laddr.port == port for at in each.net_connections("tcp")))


def of_a_write_and_a_read(watched: Watched) -> dict[str, Passed]:
    """Each with a tick; the group that is read was ready before."""
    server, run = watched.server, watched.server.start_slime(group_size=2)
    run.wait_for_state("running")
    write = watched.passed(server.pid, lambda: run.send(make_sample(instance_id=os.urandom(4).hex())))
    for n in range(2 * NUM_TIMES + 2):
        run.send(make_sample(instance_id=f"i{n // 2}", reward=float(n % 2)))
    read = watched.passed(server.pid, lambda: run.fetch(batch_size=2))
    tick = watched.tick()
    run.stop()
    return {"a write": write.with_tick(tick), "a read": read.with_tick(tick)}


def of_a_rollout_and_a_gateway_chat(watched: Watched) -> dict[str, Passed]:
    """One run has the rollout, and is then the one of the chat."""
    rows = watched.server.directory / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?", "label": "4"}\n')
    with ScriptedEngine(lambda _: "4").in_thread() as engine, httpx.Client(timeout=LIMIT_S) as http:
        run = watched.server.start_run("passes", group_size=1, remote_engine_url=engine.url, input_file=str(rows))

        def printed() -> Json:
            lines = run.client.get(f"{run.path}/log").json()["lines"]
            return next((json.loads(line[6:]) for line in lines if line.startswith("story ")), {})

        story = poll_until(printed)
        gateway = http.post(f"{story['url']}/gateway").raise_for_status().json()
        rollout = _posted(http, f"{gateway['url']}/gateway/rollouts", gateway["key"], rollout_id="r", deadline_s=60)
        url, message = f"{rollout['base_url']}/chat/completions", {"role": "user", "content": "3+3?"}
        pid = watched.listening_on(gateway["url"])
        chat = watched.passed(pid, lambda: _posted(http, url, rollout["key"], model="m", messages=[message]))
        run.stop()
    return {"a rollout": Passed(set(story["files"]), set()), "a gateway chat": chat}


def _posted(http: httpx.Client, url: str, key: str, **body: object) -> Json:
    reply: Json = http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}).raise_for_status().json()
    return reply


def main() -> None:
    """Print the files of each of the four, and all numbers last."""
    with tempfile.TemporaryDirectory(prefix="passed-") as folder:
        watched = Watched(Path(folder))
        watched.server.start()
        try:
            passes = of_a_write_and_a_read(watched) | of_a_rollout_and_a_gateway_chat(watched)
        finally:
            watched.server.stop()
            watched.server.close()
    for what, passed in passes.items():
        print(what, *sorted(passed.files), *(f"({file})" for file in sorted(passed.later)), sep="\n  ")
    for what, passed in passes.items():
        print(f"{what}: {len(passed.files)} files, and {len(passed.later)} later")


if __name__ == "__main__":
    main()
