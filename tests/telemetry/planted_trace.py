"""Trace files with planted truth: all times are seconds since the trace began."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from forebay.telemetry.analysis import load
from forebay.telemetry.analysis.timeline import ProfileStep
from forebay.telemetry.tracing.records import (
    VERSION,
    BatchChange,
    Dropped,
    GroupChange,
    Head,
    LoopStall,
    Open,
    Process,
    Read,
    Record,
    RolloutSummary,
    Span,
    TurnSummary,
    Weights,
)

START_NS = 1_790_000_000_000_000_000
RUN = "run-0123456789ab"


def ns(seconds: float) -> int:
    """A duration."""
    return round(seconds * 1e9)


class PlantedFile:
    """One file of one process. ``wall_off_s``: by how much its wall clock was off when it wrote its head."""

    def __init__(
        self, path: Path, process: Process, start: int, pid: int, begun_s: float, wall_off_s: float, boot: str = ""
    ) -> None:
        self.path = path
        self._off = ns(wall_off_s)
        self._ids = 0
        self._file: BinaryIO | None = None
        self._prefix = f"{process[0]}{start}{pid}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(
            Head(
                version=VERSION,
                run_id=RUN,
                process=process,
                start=start,
                pid=pid,
                wall_ns=self.at(begun_s),
                mono_ns=ns(10_000 + begun_s),
                boot=boot,
            )
        )

    def at(self, seconds: float) -> int:
        """A moment, as this process's clock says it."""
        return START_NS + ns(seconds) + self._off

    def new_id(self) -> str:
        self._ids += 1
        return f"{self._prefix:0<8}{self._ids:08x}"

    def write(self, record: Record) -> None:
        self.write_line(msgspec.json.encode(record) + b"\n")

    def write_line(self, line: bytes) -> None:
        if self._file is not None:
            self._file.write(line)
            return
        with self.path.open("ab") as file:
            file.write(line)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """For a great many lines."""
        with self.path.open("ab") as self._file:
            yield
        self._file = None

    def span(
        self, name: str, begin: float, end: float, uid: str, *, up: str = "", turn: int | None = None, **at: Any
    ) -> str:
        fields = _fields(at)
        id_ = fields.pop("id", None) or self.new_id()
        self.write(
            Span(name=name, t=self.at(begin), d=ns(end - begin), id=id_, up=up, uid=uid, turn=turn, at=at, **fields)
        )
        return id_

    def open(self, name: str, begin: float, uid: str, *, up: str = "", turn: int | None = None, **at: Any) -> str:
        fields = _fields(at)
        id_ = fields.pop("id", None) or self.new_id()
        self.write(Open(name=name, t=self.at(begin), id=id_, up=up, uid=uid, turn=turn, at=at, **fields))
        return id_

    def rollout(self, uid: str, begin: float, end: float, *, id_: str = "", **fields: Any) -> str:
        """A summary. ``phases`` and ``turns`` are in seconds; without phases all of it is ``decode``."""
        id_ = id_ or self.new_id()
        phases = fields.pop("phases", {"decode": end - begin})
        turns = [self._turn(*turn) for turn in fields.pop("turns", [])]
        fields = {
            "group": uid.split("/", maxsplit=1)[0],
            "instance": 1,
            "ending": "finished",
            "engine": "http://e1",
            **fields,
        }
        self.write(
            RolloutSummary(
                t=self.at(begin),
                d=ns(end - begin),
                id=id_,
                uid=uid,
                phases={name: ns(value) for name, value in phases.items()},
                turns=turns,
                **fields,
            )
        )
        return id_

    def _turn(self, begin: float, end: float, phases: dict[str, float], fields: dict[str, Any]) -> TurnSummary:
        return TurnSummary(
            t=self.at(begin), d=ns(end - begin), phases={name: ns(value) for name, value in phases.items()}, **fields
        )

    def group(self, group: str, state: str, at: float, **fields: Any) -> None:
        self.write(GroupChange(t=self.at(at), group=group, state=state, **fields))

    def read(self, asked: float, satisfied: float, sent: float, groups: list[str], **fields: Any) -> None:
        fields = {"id": self.new_id(), "judged": satisfied, "first_byte": satisfied, **fields}
        times = {name: self.at(fields.pop(name)) for name in ("judged", "first_byte")}
        self.write(
            Read(
                t=self.at(asked),
                satisfied=self.at(satisfied),
                sent=self.at(sent),
                groups=groups,
                num_rows=len(groups),
                **times,
                **fields,
            )
        )

    def batch(self, batch: str, at: float, checkpoint: int) -> None:
        self.write(BatchChange(t=self.at(at), batch=batch, state="held", checkpoint=checkpoint))

    def weights(self, at: float, version: int) -> None:
        self.write(Weights(t=self.at(at), what="announced", version=version))

    def stall(self, begin: float, end: float, stack: list[str], *, has_ended: bool = True) -> None:
        self.write(LoopStall(t=self.at(begin), d=ns(end - begin), stack=stack, has_ended=has_ended))

    def dropped(self, at: float, spans: int, why: str) -> None:
        self.write(Dropped(t=self.at(at), spans=spans, why=why))


def _fields(at: dict[str, Any]) -> dict[str, Any]:
    return {name: at.pop(name) for name in ("id", "group", "attempt") if name in at}


class PlantedTrace:
    """The folder of a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(
        self,
        process: Process,
        *,
        start: int = 1,
        pid: int = 7,
        number: int = 0,
        begun: float = 0.0,
        wall_off: float = 0.0,
        boot: str = "",
    ) -> PlantedFile:
        path = self.folder / f"{process}-{start}-{pid}.{number}.jsonl"
        return PlantedFile(path, process, start, pid, begun, wall_off, boot)

    def steps(self) -> list[ProfileStep]:
        return list(load(self.folder).steps())


def seconds(moment_s: float) -> float:
    """A moment of a timeline, since the trace began."""
    return moment_s - START_NS / 1e9


def window(step: ProfileStep) -> tuple[float, float]:
    """When ``step`` begins and ends, since the trace began."""
    return round(seconds(step.begin_s), 6), round(seconds(step.end_s), 6)


def one_group(run: PlantedFile, server: PlantedFile, group: str, begin: float, end: float) -> None:
    """A group of two rollouts, of which the second ends last."""
    run.rollout(f"{group}/0", begin, end - 1)
    run.rollout(f"{group}/1", begin, end)
    server.group(group, "ready", end, last=f"{group}/1")
