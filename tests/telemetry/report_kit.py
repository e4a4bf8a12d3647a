"""Reports as they would come of a run, without one."""

import random
from typing import Any

from forebay.telemetry.analysis.lanes import MOST_LANES, MOST_STEPS
from forebay.telemetry.analysis.report import (
    CompletionCurve,
    EngineFigures,
    EventPath,
    Finding,
    Gap,
    Lane,
    OutlierRequest,
    PathPart,
    ProfileReport,
    StepLanes,
    StepSummary,
    WhatIf,
)
from forebay.telemetry.analysis.robust import longest

HOSTILE = '<script>alert("x")</script>'
SHARES = {
    "async_generate": 74.05,
    "barrier_wait": 18.57,
    "broadcast": 6.39,
    "preprocessing": 0.52,
    "reward": 0.35,
    "padding": 0.08,
    "sorting": 0.04,
}


def make_report(num_steps: int = 8, num_workers: int = 4, num_ends: int = 128, **fields: Any) -> ProfileReport:
    """Something of everything, the same each time. ``num_ends`` is how many requests of a step are in its curves."""
    rng = random.Random(7)
    workers = [f"http://10.0.0.{index}:30000" for index in range(num_workers)]
    steps = [_step(str(number), workers, rng, number, num_ends) for number in range(num_steps)]
    slow = steps[num_steps // 2]
    slow.is_outlier, slow.seconds = True, slow.seconds + 150
    outlier = _outlier(slow.name, workers[0])
    path = EventPath(step=slow.name, worker=workers[0], group="g-17", request=outlier.request, turn=1, event="engine")
    sentence = f"Step {slow.name}: turn 2 of {outlier.request} stood 150 s in the engine. Look at that engine's log."
    report = {
        "source": "run-20260101-sums",
        "num_steps": num_steps,
        "num_requests": num_steps * num_ends,
        "total_s": sum(step.seconds for step in steps),
        "findings": [
            Finding(cause="stalled_engine", seconds=150.2, share=0.31, sentence=sentence, path=path),
            Finding(cause="reward", seconds=31.5, share=0.06, share_of="run", sentence="Rewards took 31.5 s."),
        ],
        "notes": ["212 spans were dropped: the budget of 256 MiB took the oldest."],
        "problems": ["run-0-17.0.jsonl:12: no JSON"],
        "num_problems": 1,
        "phase_shares": SHARES,
        "phase_shares_by_time": SHARES,
        "steps": steps,
        "curves": [curve for step in steps for curve in _curves(step, workers, rng, num_ends)],
        "gaps": [_gap(slow.name, workers[0])],
        "outliers": [outlier],
        "engines": [_engine(worker, index) for index, worker in enumerate(workers)],
        "lanes": [_lanes(step, workers) for step in longest(steps, MOST_STEPS, lambda step: step.seconds)],
        "whatifs": _choices(),
        "sentences": [f"The cap is reached in {num_steps} of {num_steps} steps."],
    }
    return ProfileReport(**{**report, **fields})


def hostile_report() -> ProfileReport:
    """Texts of a stranger wherever a log has a text."""
    report = make_report(num_steps=3)
    outlier, step, finding = report.outliers[0], report.steps[1], report.findings[0]
    report.source = f"run {HOSTILE}"
    outlier.request = outlier.events[0]["name"] = finding.path.request = f"uid|{HOSTILE}"
    outlier.sentence = finding.sentence = f"{HOSTILE} held it up \x1b[31m\u202e"
    outlier.worker = finding.path.worker = report.gaps[0].worker = HOSTILE
    outlier.phases = {HOSTILE: 100.0, **outlier.phases}
    step.name = outlier.step = finding.path.step = report.gaps[0].step = HOSTILE
    step.requests_by_worker = {HOSTILE: 3, "b": 4}
    step.phase_shares = step.phase_seconds = {HOSTILE: 100.0}
    report.phase_shares = report.phase_shares_by_time = {HOSTILE: 100.0}
    step.critical_path[0].path = EventPath(step=HOSTILE, group=HOSTILE, request=HOSTILE, event=HOSTILE)
    report.curves[1].step = report.curves[1].worker = HOSTILE
    lanes = report.lanes[1]
    lanes.step = lanes.lanes[0].request = lanes.lanes[0].worker = report.engines[0].engine = HOSTILE
    lanes.lanes[0].pieces = [(HOSTILE, 1.0, 20.0)]
    report.problems = [f"{HOSTILE}.jsonl:1: no JSON"]
    report.sentences = report.notes = [HOSTILE]
    return report


def _step(name: str, workers: list[str], rng: random.Random, number: int, num_requests: int) -> StepSummary:
    train, wait, send = 20 + rng.random(), 50 + 5 * rng.random(), 0.4
    path = EventPath(step=name, group="g-17", request=f"uid-{name}", worker=workers[0])
    begin = 80.0 * number
    return StepSummary(
        name=name,
        begin_s=begin,
        seconds=train + wait + send,
        train_s=train,
        wait_s=wait,
        send_s=send,
        num_requests=num_requests,
        num_used=num_requests - 10,
        critical_path=[
            _part(begin + train, wait * 0.8, path, 0, "engine"),
            _part(begin + train + wait * 0.8, wait * 0.2, path, None, "reward"),
        ],
        beyond_next_s=12.5,
        barrier_s={worker: 10 * rng.random() for worker in workers},
        requests_by_worker=dict.fromkeys(workers, num_requests // len(workers)),
        phase_shares=SHARES,
        phase_seconds={phase: share * 0.7 for phase, share in SHARES.items()},
        length_min=12,
        length_mean=480 - number,
        length_median=450,
        length_p95=900,
        length_max=1000,
        share_at_cap=0.04,
        tokens_per_s=5200 + 10 * number,
        cache_hit_rate=0.61,
        reward_mean=0.5 + 0.001 * number,
        reward_of_slowest=0.2,
        reward_of_rest=0.6,
        thrown_requests=10,
        thrown_s=84.5,
        thrown_tokens=4100,
        requests_by_turns={1: num_requests // 2, 2: num_requests // 4, 3: num_requests // 4},
        mean_seconds_by_turns={1: 9.0, 2: 21.0, 3: 33.0},
        engine_seconds_by_turn={0: 8.0, 1: 11.0, 2: 10.0},
        group_skew=7.5,
    )


def _part(begin_s: float, seconds: float, path: EventPath, turn: int | None, event: str) -> PathPart:
    where = EventPath(
        step=path.step, group=path.group, request=path.request, worker=path.worker, turn=turn, event=event
    )
    return PathPart(begin_s=begin_s, seconds=seconds, path=where)


def _curves(step: StepSummary, workers: list[str], rng: random.Random, num_ends: int) -> list[CompletionCurve]:
    curves = []
    for worker in ("", *workers):
        ends = sorted(rng.expovariate(1 / 15) for _ in range(num_ends if not worker else num_ends // len(workers)))
        marks = {
            mark: ends[min(len(ends) - 1, int(len(ends) * part))] for mark, part in (("p50", 0.5), ("p99.9", 0.999))
        }
        curves.append(
            CompletionCurve(
                step=step.name,
                worker=worker,
                ends_s=ends[:2000],
                num_requests=len(ends),
                mean_s=15.0,
                std_s=14.0,
                time_of_80=100 * ends[len(ends) * 4 // 5] / ends[-1],
                percentiles=marks,
            )
        )
    return curves


def _engine(name: str, index: int) -> EngineFigures:
    """The first engine computes its prompts more slowly than the others: fewer of their tokens are cached."""
    return EngineFigures(
        engine=name,
        num_requests=256 + index,
        num_calls=700,
        s_per_token=0.02,
        prefill_s=0.4 if index else 1.9,
        network_s=0.003,
        cached_share=0.61 if index else 0.12,
    )


def _lanes(step: StepSummary, workers: list[str]) -> StepLanes:
    """Three turns for each request; the step waited for the first one of the first worker last."""
    lanes = []
    for index in range(MOST_LANES):
        length = 1.0 if index == 0 else 0.3 + (index * 37 % 50) / 100
        unit = step.seconds / 10 * length
        parts = [(phase, unit * part) for _ in range(3) for phase, part in (("engine", 2.4), ("tool", 0.8))]
        pieces = []
        begin = 0.0
        for phase, seconds in [*parts, ("reward", 0.4 * unit)]:
            pieces.append((phase, begin, seconds))
            begin += seconds
        worker = workers[index * len(workers) // MOST_LANES]
        name = "uid-slow" if index == 0 else f"uid-{step.name}-{index}"
        lanes.append(Lane(request=name, worker=worker, is_last=index == 0, pieces=pieces))
    ends = sorted(lane.pieces[-1][1] + lane.pieces[-1][2] for lane in lanes)
    in_flight = [(0.0, len(lanes)), *((end, len(lanes) - place - 1) for place, end in enumerate(ends))]
    return StepLanes(step=step.name, num_requests=step.num_requests, lanes=lanes, in_flight=in_flight)


def _gap(step: str, worker: str) -> Gap:
    return Gap(
        step=step,
        worker=worker,
        begin_s=25,
        end_s=175,
        num_before=100,
        num_after=28,
        rate_before=4.0,
        rate_after=3.9,
        is_standstill=True,
    )


def _outlier(step: str, worker: str) -> OutlierRequest:
    turns = [
        {"turn": 0, "begin_s": 0.0, "seconds": 20.0, "engine": 20.0},
        {"turn": 1, "begin_s": 20.0, "seconds": 153.0},
    ]
    events = [
        {"name": "engine", "begin_s": 0.0, "seconds": 20.0, "turn": 0},
        {"name": "tool", "begin_s": 20.0, "seconds": 3.0, "turn": 0},
        {"name": "engine", "begin_s": 23.0, "seconds": 150.0, "turn": 1},
        {"name": "reward", "begin_s": 173.0, "seconds": 0.4, "turn": None},
    ]
    return OutlierRequest(
        step=step,
        request="uid-slow",
        worker=worker,
        group="g-17",
        begin_s=400.0,
        seconds=173.4,
        beyond_s=150.2,
        cause="stalled_engine",
        sentence="Turn 2 stood 150 s in the engine.",
        turn=1,
        phases={"engine": 170.0, "tool": 3.0, "reward": 0.4},
        turns=turns,
        events=events,
    )


def _choices() -> list[WhatIf]:
    caps = [
        WhatIf(what="cap", value=cap, saved_s=(1000 - cap) / 40, num_cut=(1000 - cap) // 10, reward_lost=1.5)
        for cap in (400, 600, 800)
    ]
    return [
        *caps,
        *(
            WhatIf(what="wait_for", value=part, saved_s=100 * (1 - part), num_cut=round(1000 * (1 - part)))
            for part in (0.8, 0.9, 1.0)
        ),
    ]
