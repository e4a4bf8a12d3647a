"""Traces of ours, and published logs of multi-turn profiles, as rollouts. A line that is broken is an error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.ids import InstanceId
from forebay.telemetry.analysis.load_published import PublishedLog
from forebay.telemetry.analysis.timeline import Request, TurnTimes
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.read_trace import HALF_A_LINE, find_trace
from forebay.telemetry.tracing.records import Dropped, Read, RolloutSummary, RunPlan, TurnSummary
from forebay.workers.simulator.recorded.rollout_log import LoggedRollout, LoggedTurn, RolloutLog

FIELD = "source"
NS = 1e-9
_WAITS = ("hold", "engine_wait", "retry")
_ENGINE = ("engine_queue", "prefill", "decode", "engine")


def read_log(source: Path, title: str = "") -> RolloutLog:
    """The log in a folder, or in one file of a trace. Raises ``InvalidInput`` for one of which nothing can be learned.

    That is one with a broken line, and one in which no rollout has a length.
    """
    log = _read_trace(source) if source.is_file() or find_trace(source) else _read_published(source)
    log.title = title or str(source)
    if not log.rollouts:
        raise InvalidInput(f"no rollout has ended in {log.title}", hint="name the log of another run", field=FIELD)
    if not any(each.is_whole for each in log.rollouts):
        message = f"the log {log.title} has no lengths: none of its {len(log.rollouts)} rollouts tells sampled tokens"
        hint = "answers are counted where the base generator's client, or the gateway, asked the engine for tokens"
        raise InvalidInput(message, hint=hint, field=FIELD)
    return log


# --- traces


def _read_trace(source: Path) -> RolloutLog:
    bad = _BadLines()
    db = TraceDB.read(source, on_bad_line=bad.add)
    if bad.first is not None:
        raise bad.first
    # By their ids: a record that comes again, from a copied file, counts once.
    summaries = {line.record.id: line.record for line in db.summaries() if isinstance(line.record, RolloutSummary)}
    rollouts = sorted(map(_of_summary, summaries.values()), key=lambda each: each.started_s)
    of_run = [line.record for line in db.of_run()]
    log = RolloutLog("", rollouts, settings=_settings_of([each for each in of_run if isinstance(each, RunPlan)]))
    reads = {each.id: len(each.groups) for each in of_run if isinstance(each, Read) and each.groups}
    log.groups_by_read = list(reads.values())
    num_dropped = sum(each.summaries for each in of_run if isinstance(each, Dropped))
    if num_dropped:
        bad.notes.append(f"{num_dropped} summaries of rollouts are not in the trace, as it says itself")
    log.notes = bad.notes
    return log


class _BadLines:
    """Lines that are no records: an error, but for the last half of a line, which a process that was killed leaves."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.first: InvalidInput | None = None

    def add(self, file: str, line: int, what: str) -> None:
        if what == HALF_A_LINE:
            self.notes.append(f"{file}:{line} is half a line, which is left out")
        elif self.first is None:
            self.first = broken_line(file, line, what)


def broken_line(file: str, line: int, what: str) -> InvalidInput:
    """The error for a line that cannot be read."""
    return InvalidInput(f"{file}: line {line} is broken: {what}", hint="mend the line, or take it out", field=FIELD)


def _settings_of(plans: list[RunPlan]) -> dict[str, Any]:
    """The plan that was recorded last: a process that was started again has the same, or what an edit made of it."""
    if not plans:
        return {}
    stated = msgspec.structs.asdict(max(plans, key=lambda plan: plan.t))
    return {name: value for name, value in stated.items() if value and name != "t"}


def _of_summary(record: RolloutSummary) -> LoggedRollout:
    ended = record.t + record.d
    started = record.started or ended
    left = max(started, ended - record.phases.get("write", 0))
    waited = sum(record.phases.get(name, 0) for name in _WAITS)
    return LoggedRollout(
        record.instance,
        record.epoch,
        record.number,
        record.attempt,
        record.step,
        record.ending,
        record.reward,
        record.is_capped,
        started * NS,
        left * NS,
        ended * NS,
        waited * NS,
        [_of_turn(turn, record) for turn in record.turns],
    )


def _of_turn(turn: TurnSummary, record: RolloutSummary) -> LoggedTurn:
    seconds = {name: turn.phases.get(name, 0) * NS for name in _ENGINE}
    waited = sum(turn.phases.get(name, 0) for name in _WAITS) * NS
    logged = _turn(turn.t * NS + waited, seconds, turn.engine or record.engine, turn)
    logged.group = record.instance, record.epoch
    logged.is_capped = turn.finish_reason == "length"
    return logged


def _turn(begin_s: float, seconds: dict[str, float], engine: str, counts: TurnSummary | TurnTimes) -> LoggedTurn:
    tokens = (
        (counts.prompt, counts.cached, counts.sampled)
        if isinstance(counts, TurnSummary)
        else (counts.prompt_tokens, counts.cached_tokens, counts.sampled_tokens)
    )
    is_split = seconds.get("decode", 0.0) > 0
    return LoggedTurn(
        begin_s,
        engine,
        *tokens,
        queue_s=seconds.get("engine_queue", 0.0),
        prefill_s=seconds.get("prefill", 0.0),
        decode_s=seconds.get("decode", 0.0),
        unsplit_s=seconds.get("engine", 0.0),
        is_split=is_split,
    )


# --- published logs


def _read_published(folder: Path) -> RolloutLog:
    published = PublishedLog(folder)
    rollouts = list(_requests(published))
    for first in published.problems.first:
        raise broken_line(first.file, first.line, first.what)
    rollouts.sort(key=lambda each: each.started_s)
    # An export of ours says which group a request is of; the logs of others know requests alone.
    is_grouped = len({each.instance for each in rollouts}) < len(rollouts)
    log = RolloutLog("", rollouts, is_grouped=is_grouped, settings=_steps_of(rollouts))
    log.notes += published.notes
    if not is_grouped:
        log.notes.append("it does not say which answers are those of one prompt: each is a prompt of its own")
    return log


def _steps_of(rollouts: list[LoggedRollout]) -> dict[str, Any]:
    """Each step of such a log was trained on before the next began: that is over-sampling by none."""
    sizes = {
        step: len({each.instance for each in rollouts if each.step == step and each.is_whole})
        for step in {each.step for each in rollouts}
    }
    return {"oversampling": {"groups_per_step": min(sizes.values())}} if len(sizes) > 1 and min(sizes.values()) else {}


def _requests(published: PublishedLog) -> Iterator[LoggedRollout]:
    numbers: dict[InstanceId, int] = {}
    for count, step in enumerate(published.steps()):
        for request in sorted(step.requests, key=lambda each: each.begin_s):
            if request.ending == "open":
                continue
            instance = request.group or request.request_id
            number = numbers[instance] = numbers.get(instance, -1) + 1
            yield _of_request(request, instance, number, count)


def _of_request(request: Request, instance: str, number: int, step: int) -> LoggedRollout:
    def seconds(*names: str) -> float:
        return sum(request.phases.get(name, 0.0) for name in names)

    turns = [_turn(turn.begin_s, dict(turn.phases), turn.engine or request.worker, turn) for turn in request.turns]
    if request.sampled_tokens and not sum(turn.sampled for turn in turns):
        turns = [_whole_turn(request)]
    for turn in turns:
        turn.group = instance, 0
    return LoggedRollout(
        instance,
        0,
        number,
        max(0, request.num_attempts - 1),
        step,
        request.ending,
        request.reward,
        request.is_capped,
        request.begin_s + seconds("queue", "admission"),
        max(request.begin_s, request.end_s - seconds("write")),
        request.end_s,
        seconds(*_WAITS),
        turns,
    )


def _whole_turn(request: Request) -> LoggedTurn:
    """Of a request whose turns are not told, or tell no tokens: all its calls as one."""
    counts = TurnTimes(
        0,
        request.begin_s,
        request.end_s,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        sampled_tokens=request.sampled_tokens,
    )
    return _turn(request.begin_s, dict(request.phases), request.worker, counts)
