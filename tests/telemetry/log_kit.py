"""Traces for tests of exports: written line by line, as a run, its gateway and its server would."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from forebay.telemetry.tracing.records import (
    VERSION,
    GroupChange,
    Head,
    LoopStall,
    Open,
    ProcessChange,
    Read,
    Record,
    RolloutSummary,
    Span,
    TurnSummary,
    Weights,
)

ZERO = 1_700_000_000_000_000_000
S = 1_000_000_000
RUN_ID = "run-abc"
ENGINE = "http://engine.example:30000"


def head(process: Any = "run", number: int = 0) -> Head:
    return Head(version=VERSION, run_id=RUN_ID, process=process, start=1, pid=7, wall_ns=ZERO, mono_ns=5, number=number)


def span_id(number: int) -> str:
    return f"{number:016x}"


def span(name: str, begin: float, seconds: float, number: int, up: int = 1, **fields: Any) -> Span:
    known = {"uid": "u-0", "group": "g", **fields}
    above = span_id(up) if up else ""
    return Span(name=name, t=ZERO + int(begin * S), d=int(seconds * S), id=span_id(number), up=above, **known)


def summary(begin: float, seconds: float, number: int = 1, **fields: Any) -> RolloutSummary:
    known: dict[str, Any] = {
        "uid": "u-0",
        "group": "g",
        "instance": "task",
        "ending": "finished",
        "engine": ENGINE,
        **fields,
    }
    return RolloutSummary(t=ZERO + int(begin * S), d=int(seconds * S), id=span_id(number), **known)


def rollout() -> list[Record]:
    """One of two turns, with a tool; ids from 1."""
    call = {
        "engine": ENGINE,
        "prompt": 30,
        "cached": 10,
        "sampled": 7,
        "finish_reason": "tool_calls",
        "versions": ["4"],
    }
    turns = [
        TurnSummary(t=ZERO + S, d=5 * S, versions=["4"]),
        TurnSummary(t=ZERO + 6 * S, d=3 * S, versions=["4", "5"]),
    ]
    return [
        span("queue", 0, 1, 2),
        span("engine_queue", 1, 0.5, 5, up=4, turn=0),
        span("decode", 1.5, 1.5, 6, up=4, turn=0),
        span("engine", 1, 2, 4, up=3, turn=0, at={**call, "versions": ["4"]}),
        span("turn", 1, 3, 3, turn=0),
        span("tool", 3, 2, 7, up=3, turn=0, at={"tool": "calculator"}),
        span("tool", 4, 2, 8, up=3, turn=0, at={"tool": "python", "error": "ValueError"}),
        span("engine", 6, 1, 10, up=9, turn=1, at={**call, "finish_reason": "stop"}),
        span("parse", 7, 0.5, 11, up=9, turn=1, at={"bytes": 12}),
        span("turn", 6, 2, 9, turn=1),
        span("reward", 8, 1, 12, at={"cpu_s": 0.9}),
        span("attempt", 0, 9, 1, up=0),
        summary(0, 9, reward=0.5, slot=3, step=2, turns=turns, phases={"engine": 3 * S, "tool": 6 * S}),
    ]


def delivery() -> list[Record]:
    """What a server records of it: the group, a read that waited for it, weights, a pause, a loop that stood still."""

    def at(seconds: float) -> int:
        return ZERO + int(seconds * S)

    return [
        GroupChange(t=at(0), group="g", state="open"),
        ProcessChange(t=at(0), what="started"),
        Weights(t=at(1), what="announced", version=5),
        Weights(t=at(2), what="paused"),
        Weights(t=at(3), what="resumed"),
        LoopStall(t=at(3), d=2 * S, stack=["file.py:1 sleep"]),
        GroupChange(t=at(9), group="g", state="ready", last="u-0"),
        GroupChange(t=at(9.2), group="g", state="leased", batch="b-1"),
        Read(
            t=at(5),
            id=span_id(90),
            satisfied=at(9),
            by="g",
            judged=at(9.1),
            first_byte=at(9.2),
            sent=at(9.5),
            batch="b-1",
            step=67,
            groups=["g"],
        ),
        GroupChange(t=at(10), group="g", state="acked", batch="b-1"),
        ProcessChange(t=at(10), what="ended"),
    ]


def still_open(begin: float, number: int, name: str = "engine", up: int = 1, **fields: Any) -> Open:
    known = {"uid": "u-0", "group": "g", **fields}
    return Open(name=name, t=ZERO + int(begin * S), id=span_id(number), up=span_id(up) if up else "", **known)


def write_log(folder: Path, process: Any = "run", *records: Record | bytes, number: int = 0) -> Path:
    """Append to the file of ``process``, which begins with a head."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{process}-1-7.{number}.jsonl"
    with path.open("ab") as file:
        if not file.tell():
            file.write(msgspec.json.encode(head(process, number)) + b"\n")
        file.writelines(each if isinstance(each, bytes) else msgspec.json.encode(each) + b"\n" for each in records)
    return path


def make_log(folder: Path) -> Path:
    """A whole trace."""
    write_log(folder, "run", *rollout())
    write_log(folder, "server", *delivery())
    return folder


def moved(records: Iterable[Record], seconds: int) -> list[Record]:
    """The same once more, so much later: another group, and the next step."""
    later = []
    for each in records:
        fields = {name: getattr(each, name) for name in each.__struct_fields__}
        for name in ("t", "satisfied", "judged", "first_byte", "sent"):
            if fields.get(name):
                fields[name] += seconds * S
        for name in ("group", "uid", "last", "by", "batch"):
            if fields.get(name):
                fields[name] += "-later"
        if fields.get("groups"):
            fields |= {"groups": ["g-later"], "step": fields["step"] + 1}
        if "id" in fields:
            fields["id"] = f"{int(fields['id'], 16) + 1_000:016x}"
        if fields.get("up"):
            fields["up"] = f"{int(fields['up'], 16) + 1_000:016x}"
        if fields.get("turns"):
            fields["turns"] = [msgspec.structs.replace(turn, t=turn.t + seconds * S) for turn in fields["turns"]]
        later.append(type(each)(**fields))
    return later
