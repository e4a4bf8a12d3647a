"""Reads rollouts from Forebay's traces and verl's profile logs. A broken line is an error."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.ids import InstanceId
from forebay.telemetry.analysis.verl_log import VerlLog
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.read_trace import HALF_A_LINE, find_trace
from forebay.telemetry.tracing.records import Dropped, Read, RolloutSummary, RunPlan, TurnSummary
from forebay.workers.simulator.recorded.rollout_log import RolloutLog, is_whole

FIELD = "source"


def read_log(source: Path, title: str = "") -> RolloutLog:
    """Read the log in a folder, or in one file of a trace.

    Raises ``InvalidInput`` if a line is broken, or if no rollout has a length.
    """
    log = _read_trace(source) if source.is_file() or find_trace(source) else _read_verl_log(source)
    log.title = title or str(source)
    if not log.rollouts:
        raise InvalidInput(f"no rollout has ended in {log.title}", hint="use the log of another run", field=FIELD)
    if not any(map(is_whole, log.rollouts)):
        message = f"the log {log.title} has no lengths: none of its {len(log.rollouts)} rollouts records sampled tokens"
        hint = "tokens are counted only for calls through the base generator's client or the gateway"
        raise InvalidInput(message, hint=hint, field=FIELD)
    return log


def _in_order(rollouts: Iterable[RolloutSummary]) -> list[RolloutSummary]:
    """Sort by start. A rollout that never started counts as started at its end."""
    found = list(rollouts)
    for each in found:
        each.started = each.started or each.end
    return sorted(found, key=lambda each: each.started)


# --- traces


def _read_trace(source: Path) -> RolloutLog:
    bad = _BadLines()
    db = TraceDB.read(source, on_bad_line=bad.add)
    if bad.first is not None:
        raise bad.first
    # By id, so that a record repeated in a copied file counts once.
    summaries = {line.record.id: line.record for line in db.summaries() if isinstance(line.record, RolloutSummary)}
    of_run = [line.record for line in db.of_run()]
    log = RolloutLog(
        "", _in_order(summaries.values()), settings=_settings_of([each for each in of_run if isinstance(each, RunPlan)])
    )
    reads = {each.id: len(each.groups) for each in of_run if isinstance(each, Read) and each.groups}
    log.groups_by_read = list(reads.values())
    num_dropped = sum(each.summaries for each in of_run if isinstance(each, Dropped))
    if num_dropped:
        bad.notes.append(f"the trace reports that {num_dropped} summaries of rollouts are missing")
    log.notes = bad.notes
    return log


class _BadLines:
    """Lines that are not records. They are errors, except an incomplete last line, which a killed process leaves."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.first: InvalidInput | None = None

    def add(self, file: str, line: int, what: str) -> None:
        if what == HALF_A_LINE:
            self.notes.append(f"{file}:{line} is incomplete and was skipped")
        elif self.first is None:
            self.first = broken_line(file, line, what)


def broken_line(file: str, line: int, what: str) -> InvalidInput:
    """The error for a line that cannot be read."""
    return InvalidInput(f"{file}: line {line} is broken: {what}", hint="repair or remove the line", field=FIELD)


def _settings_of(plans: list[RunPlan]) -> dict[str, Any]:
    """The plan that was recorded last. A restarted process records it again, possibly edited."""
    if not plans:
        return {}
    stated = msgspec.structs.asdict(max(plans, key=lambda plan: plan.t))
    return {name: value for name, value in stated.items() if value and name != "t"}


# --- verl's logs


def _read_verl_log(folder: Path) -> RolloutLog:
    source = VerlLog(folder)
    rollouts = _in_order(_summaries(source))
    for first in source.problems.first:
        raise broken_line(first.file, first.line, first.what)
    # A log may name the group of a request; verl's own code logs only requests.
    is_grouped = len({each.instance for each in rollouts}) < len(rollouts)
    log = RolloutLog("", rollouts, is_grouped=is_grouped, settings=_steps_of(rollouts))
    log.notes += source.notes
    if not is_grouped:
        log.notes.append("the log does not group answers by prompt, so each answer counts as a prompt of its own")
    return log


def _steps_of(rollouts: list[RolloutSummary]) -> dict[str, Any]:
    """Settings for a log whose steps were trained on one by one: groups per step, without over-sampling."""
    sizes = {
        step: len({each.instance for each in rollouts if each.step == step and is_whole(each)})
        for step in {each.step for each in rollouts}
    }
    return {"oversampling": {"groups_per_step": min(sizes.values())}} if len(sizes) > 1 and min(sizes.values()) else {}


def _summaries(source: VerlLog) -> Iterator[RolloutSummary]:
    """Summaries, completed with what such a log lacks: number, step and start of a rollout."""
    numbers: dict[InstanceId, int] = {}
    for step, attempts in enumerate(source.attempts()):
        for summary in sorted((each.summary for each in attempts if each.summary), key=lambda each: each.t):
            if summary.ending == "open":
                continue
            instance, phases = summary.instance, summary.phases
            summary.number = numbers[instance] = numbers.get(instance, -1) + 1
            summary.group, summary.step = str(instance), step
            summary.started = summary.t + phases.get("queue", 0) + phases.get("admission", 0)
            if summary.sampled and not sum(turn.sampled for turn in summary.turns):
                # Its turns are missing or have no tokens: all its calls count as one.
                only = TurnSummary(t=summary.t, d=summary.d, phases=phases)
                only.prompt, only.cached, only.sampled = summary.prompt, summary.cached, summary.sampled
                summary.turns = [only]
            summary.sampled = sum(turn.sampled for turn in summary.turns)
            yield summary
