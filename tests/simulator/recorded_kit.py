"""Traces of runs that were simulated: as a run process would have written them, on engines that are known exactly."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from forebay.telemetry.tracing.records import VERSION, Head, Record, RolloutSummary, RunPlan, TurnSummary
from forebay.workers.simulator.attempt_records import SimulatedRollout
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.populations import AnswerLengths, Population
from forebay.workers.simulator.recorded.rollout_log import RolloutLog
from forebay.workers.simulator.scenario import Scenario, SimulatedRun, simulate

S = 1_000_000_000
AT_S = 1_750_000_000
PROMPT, STEP_S = 172, 0.01
STEPS = """
from forebay.generators.base import BaseGenerator, single_turn
TASK_TYPE = "steps"
def reward(item):
    return 1.0
def run_rollout(data):
    async def rollout(client, messages, params):
        messages = [{"role": "user", "content": f"{messages[-1]['content']} {client.rollout.slot}"}]
        return await single_turn(client, messages, params)
    return BaseGenerator.from_payload(data).entry(data["input_file"], rollout, reward)
"""
"""A generator whose prompts name their rollouts."""
SMALL = Population("small", 2_048, 200, 0.4, 0.3)


def small_scenario(engines: Sequence[EngineCost] = (EngineCost(places=64),) * 2, **changes: object) -> Scenario:
    """Twelve prompts with four answers each."""
    scenario = Scenario(
        prompts=SMALL.prompts(12, 1), group_size=4, num_process=16, engines=engines, max_tokens=SMALL.cap, seed=3
    )
    return replace(scenario, **changes)


def write_trace(folder: Path, run: SimulatedRun, *, has_lengths: bool = True, has_plan: bool = True) -> Path:
    """The trace of a simulated run, in ``folder/trace``; its engines tell when they begin to decode."""
    scenario = run.scenario
    head = Head(version=VERSION, run_id="run-1", process="run", start=1, pid=1, wall_ns=AT_S * S, mono_ns=1)
    plan = RunPlan(
        t=AT_S * S,
        task_type="small",
        group_size=scenario.group_size,
        num_process=scenario.num_process,
        num_epochs=scenario.num_epochs,
        max_tokens=scenario.max_tokens,
        engines=[f"http://engine-{number}" for number in range(len(scenario.engines))],
        scheduler=scenario.scheduler.model_dump(exclude_defaults=True),
        oversampling=scenario.oversampling.model_dump(exclude_defaults=True) if scenario.oversampling else {},
    )
    records: list[Record] = [head, *([plan] if has_plan else [])]
    in_order = sorted(run.rollouts, key=lambda each: (each.started, str(each.instance).zfill(9), each.number))
    records += [_summary(run, each, place, has_lengths) for place, each in enumerate(in_order)]
    path = folder / "trace" / "run-1-1.1.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.Encoder().encode_lines(records))
    return path


def _summary(run: SimulatedRun, each: SimulatedRollout, place: int, has_lengths: bool) -> RolloutSummary:
    started = min(each.end, each.started + place * 1_000)  # in a real run no two begin at the same moment
    cost = next(
        engine for number, engine in enumerate(run.scenario.engines) if each.engine == f"http://engine-{number}"
    )
    lasted = each.end - started
    tool = min(lasted, round(cost.tool_s * S))
    known = {name: getattr(each, name) for name in RolloutSummary.__struct_fields__}
    known |= {"t": each.t + AT_S * S, "started": started + AT_S * S, "phases": {"engine": lasted - tool, "tool": tool}}
    known["sampled"] = each.sampled if has_lengths else 0
    turn = TurnSummary(t=known["started"], d=lasted, **{name: known[name] for name in TURN_FIELDS})
    return RolloutSummary(**{**known, "turns": [turn]})


TURN_FIELDS = ("engine", "prompt", "cached", "sampled", "phases")


def recorded_run(folder: Path, scenario: Scenario | None = None) -> tuple[Path, SimulatedRun]:
    """A trace, and the run of which it is."""
    run = simulate(scenario or small_scenario())
    return write_trace(folder, run), run


def prompt_of(*lengths: int, name: str = "p") -> AnswerLengths:
    """One whose answers were recorded."""
    return AnswerLengths(name, 10, sum(lengths) / len(lengths), 0.0, recorded=lengths)


def queued_log(places: int, kv_tokens: int, tail_s: float = 0.0) -> RolloutLog:
    """Of an engine that lets calls in while all that they may sample has room, siblings' prompts counted once.

    Worked out step by step, by no model of ours. Each call said how long its answer would be, and its engine took
    ``tail_s`` more than its steps.
    """
    draw = Random(7)
    calls = [TurnSummary(t=0, d=0, engine="e", prompt=PROMPT, sampled=draw.randint(40, 300)) for _ in range(48)]
    waiting, running, left, admitted = deque(range(48)), list[int](), dict[int, int](), dict[int, int]()
    for step in count():
        for place in [each for each in running if not left[each]]:
            running.remove(place)
            decode_s = calls[place].sampled * STEP_S + tail_s
            calls[place].phases = {"engine_queue": round(admitted[place] * STEP_S * S), "decode": round(decode_s * S)}
        while waiting and len(running) < places and _demand([*running, waiting[0]], calls) <= kv_tokens:
            place = waiting.popleft()
            calls[place].cached = 170 if place % 4 else 0
            admitted[place], left[place] = step, calls[place].sampled
            running.append(place)
        if not running:
            break
        left.update({each: left[each] - 1 for each in running})
    rollouts = [_finished(call, place) for place, call in enumerate(calls)]
    return RolloutLog("queued", rollouts, settings={"group_size": 4, "num_process": 48, "max_tokens": 4_096})


def _finished(call: TurnSummary, place: int) -> RolloutSummary:
    call.finish_reason = "length"
    started, instance = 1 + place * 1_000, f"p{place // 4}"
    return RolloutSummary(
        t=started,
        d=sum(call.phases.values()) - started,
        id=f"{place:016x}",
        uid=f"uid-{place}",
        group=instance,
        instance=instance,
        number=place % 4,
        ending="finished",
        reward=1.0,
        started=started,
        sampled=call.sampled,
        is_capped=True,
        turns=[call],
    )


def _demand(running: Sequence[int], calls: Sequence[TurnSummary]) -> int:
    return sum(calls[each].sampled for each in running) + PROMPT * len({each // 4 for each in running})
