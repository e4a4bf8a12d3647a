"""Traces of any size: steps of rollouts with three turns each, as two engines, a gateway and a trainer leave them."""

import random
from pathlib import Path

from tests.telemetry.planted_trace import PlantedFile, PlantedTrace

GROUP = 8
SPANS_PER_ROLLOUT = 20
_PERIOD_S = 100.0


def plant_steps(folder: Path, num_steps: int, rollouts_per_step: int, seed: int = 1) -> int:
    """Write a trace; how many spans it has."""
    trace = PlantedTrace(folder)
    run, server = trace.file("run"), trace.file("server", pid=8)
    dice = random.Random(seed)
    num_spans = 0
    with run.kept_open(), server.kept_open():
        for step in range(num_steps):
            begin = step * _PERIOD_S
            groups = []
            for number in range(rollouts_per_step // GROUP):
                group = f"{step:08x}{number:08x}"
                ends = [_rollout(run, group, slot, begin, dice) for slot in range(GROUP)]
                num_spans += GROUP * SPANS_PER_ROLLOUT
                server.group(group, "open", begin)
                server.group(group, "ready", max(ends), last=f"{group}/{ends.index(max(ends))}")
                groups.append((max(ends), group))
            satisfied = max(groups)[0]
            server.read(begin, satisfied, satisfied + 1, [group for _, group in groups], step=step, by=max(groups)[1])
    return num_spans


def _rollout(run: PlantedFile, group: str, slot: int, begin: float, dice: random.Random) -> float:
    """Twenty spans; when it ended."""
    uid = f"{group}/{slot}"
    attempt, engine = run.new_id(), f"http://engine-{slot % 2}:30000"
    at = begin + dice.uniform(0.0, 0.5)
    run.span("queue", begin, at, uid, up=attempt, group=group)
    phases = {"queue": at - begin}
    turns = []
    for number in range(3):
        lasts = dice.lognormvariate(1.5, 0.4)
        facts = {"engine": engine, "sampled": round(100 * lasts), "prompt": 900, "cached": 500}
        turn = run.span("turn", at, at + lasts, uid, up=attempt, turn=number, group=group, **facts)
        call = run.span("engine", at, at + lasts, uid, up=turn, turn=number, group=group, **facts)
        run.span("engine_queue", at, at + 0.1 * lasts, uid, up=call, turn=number, group=group)
        run.span("decode", at + 0.2 * lasts, at + lasts, uid, up=call, turn=number, group=group)
        run.span("prefill", at + 0.1 * lasts, at + 0.2 * lasts, uid, up=call, turn=number, group=group)
        run.span("tool", at + lasts, at + 1.2 * lasts, uid, up=attempt, turn=number, group=group, tool="search")
        own = {"engine_queue": 0.1 * lasts, "prefill": 0.1 * lasts, "decode": 0.8 * lasts, "tool": 0.2 * lasts}
        phases = {name: phases.get(name, 0.0) + own.get(name, 0.0) for name in {**phases, **own}}
        turns.append((at, at + 1.2 * lasts, own, facts))
        at += 1.2 * lasts
    run.rollout(
        uid,
        begin,
        at,
        id_=attempt,
        group=group,
        phases=phases,
        turns=turns,
        engine=engine,
        has_spans=True,
        prompt=2700,
        cached=1500,
        sampled=sum(turn[3]["sampled"] for turn in turns),
        reward=dice.random(),
    )
    run.span("attempt", begin, at, uid, id=attempt, group=group)
    return at
