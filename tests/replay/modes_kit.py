"""Runs of the base generator that are recorded, and then used by others: a real server around a scripted engine."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.engines.scripted import Script, ScriptedCall, ScriptedEngine, ThreadedEngine
from tests.kit import Json, NativeRun, ServerProcess, write_generator

GROUP_SIZE = 4
HELD_S = 120.0
"""After it, a gate opens by itself, so that a test that fails ends."""
SOURCE = '''
"""Rollouts fail where the engine says so. The reward is the number that the answer ends with, and `SHIFT`."""
from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "words"
SHIFT = 0.0


def reward_func(item):
    answer = item["messages"][-1]["content"]
    if "unjudged" in answer:
        raise RuntimeError("no judgement")
    return float(answer.split()[-1]) + item["bonus"] + SHIFT


async def rollout_func(client, messages, params):
    messages, finish_reason = await single_turn(client, messages, params)
    client.rollout.for_reward["bonus"] = 0.5
    if "broken" in messages[-1]["content"]:
        raise ValueError("the rollout is broken")
    return messages, finish_reason


def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    generator.entry(data["input_file"], rollout_func, reward_func, data.get("num_epoch", 1))
'''
NAME = "words_generator.py"


@dataclass
class Answers:
    """What the engine says to a row's calls, in the order in which they come; else ``fine`` and a running number."""

    by_row: dict[str, list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """The rows that were asked about, one for each call."""

    def __call__(self, call: ScriptedCall) -> str:
        row = call.messages[-1]["content"].split()[-1]
        self.asked.append(row)
        planned = self.by_row.get(row, [])
        return planned.pop(0) if planned else f"fine {len(self.asked)}"

    @property
    def counted(self) -> Counter[str]:
        """How often each row was asked about since ``forget``."""
        return Counter(self.asked)

    def forget(self) -> None:
        """What follows is another run."""
        self.asked.clear()
        self.by_row.clear()


def held(answers: Answers) -> tuple[Script, threading.Event]:
    """What an engine says, but not before the event is set."""
    gate = threading.Event()

    async def slow(call: ScriptedCall) -> str:
        await asyncio.to_thread(gate.wait, HELD_S)
        return answers(call)

    return slow, gate


def write_words(folder: Path, shift: float = 0.0, *, judges_all: bool = False) -> Path:
    """The generator file, whose rewards are all ``shift`` higher; ``judges_all``: no judge fails."""
    source = SOURCE.replace("unjudged", "unheard of") if judges_all else SOURCE
    return write_generator(folder, source.replace("SHIFT = 0.0", f"SHIFT = {shift}"), NAME)


def write_rows(path: Path, names: Sequence[str], say: Callable[[str], str] = lambda name: name) -> Path:
    """Rows whose prompts end with their ids, or what else there is to be asked."""
    rows = [{"instance_id": name, "prompt": say(name)} for name in names]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@contextmanager
def scripted(answers: Answers) -> Iterator[ThreadedEngine]:
    """An engine that says them."""
    with ScriptedEngine(answers).in_thread() as engine:
        yield engine


def start(server: ServerProcess, rows: Path, engine_url: str, **changes: Any) -> NativeRun:
    """A run over the rows, whose rollouts have one attempt."""
    payload = {
        "input_file": str(rows),
        "remote_engine_url": engine_url,
        "num_process": 4,
        "max_attempts": 1,
        "min_timeout_group_size_ratio": 0.0,
        "min_valid_group_size_ratio": 0.25,
        "min_valid_item_size_ratio": 0.25,
        **changes,
    }
    return server.start_run("words", payload.pop("group_size", GROUP_SIZE), **payload)


def finished(run: NativeRun) -> Json:
    """Its view, once its process has returned."""
    view = run.wait_for_state("finished")
    assert view["is_waiting_for_engine"] is False
    return view


def slots(run: NativeRun) -> dict[tuple[str, int, int], Json]:
    """What is stored of each slot, by instance, epoch and slot."""
    groups = [run.group(group["group_id"]) for group in run.groups()]
    return {(g["instance_id"], g["epoch"], s["slot"]): s for g in groups for s in g["samples"] if not s.get("fork")}


def rows_of(run: NativeRun, num_groups: int) -> dict[str, Json]:
    """The rows of so many groups, as a trainer reads them, by uid."""
    return {row["uid"]: row for row in run.take(num_groups=num_groups, wait_s=30)["data"]}


def as_recorded(row: Json) -> Json:
    """A row without what a replay adds, and with the reward as it was before it became an advantage."""
    told = {name: value for name, value in row.items() if name not in ("replayed_from", "raw_reward")}
    return {**told, "reward": row.get("raw_reward", row["reward"])}


def counts(view: Json) -> tuple[int, int, int]:
    """Hits, misses and substitutes."""
    hits, misses, substitutes = (view["counts"].get(f"replay_{n}", 0) for n in ("hits", "misses", "substitutes"))
    return hits, misses, substitutes
