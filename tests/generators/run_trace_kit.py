"""Real run processes that are traced, and what they have recorded."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forebay.generators.process.code_copy import copy_code
from forebay.generators.process.run_logs import log_path, read_tail
from forebay.generators.process.spec import Report, RunSpec
from forebay.server.runs.process import RunProcess
from forebay.telemetry.tracing.records import Record, RolloutSummary, Span
from forebay.telemetry.tracing.tracer import TraceSettings
from tests.kit import write_generator
from tests.telemetry.trace_kit import records_in

Json = dict[str, Any]
R = TypeVar("R", bound=Record)
LIMIT_S = 90.0
RUN_ID = "run-0123456789ab"
"""That of the plan of the fake buffer."""
S = 1_000_000_000


@dataclass
class RecordedRun:
    """What the run process in ``folder`` has left."""

    folder: Path
    samples: list[Json] = field(default_factory=list)
    report: Report | None = None

    @property
    def trace_dir(self) -> Path:
        return self.folder / "trace"

    def log(self) -> str:
        return "\n".join(read_tail(log_path(self.folder / "run"), 200))

    def records(self) -> list[Record]:
        """All of them, in the order of the lines."""
        return records_in(self.trace_dir)

    def of(self, kind: type[R], **wanted: object) -> list[R]:
        """The records of one kind with these values, in the order of time."""
        found = [each for each in self.records() if isinstance(each, kind)]
        matching = [each for each in found if all(getattr(each, name) == value for name, value in wanted.items())]
        return sorted(matching, key=lambda each: each.t)

    def summaries(self, instance: object) -> list[RolloutSummary]:
        """Those of an instance's attempts."""
        return self.of(RolloutSummary, instance=instance)

    def summary(self, instance: object) -> RolloutSummary:
        """That of its only attempt."""
        (found,) = self.summaries(instance)
        return found

    def spans(self, summary: RolloutSummary, *names: str) -> list[Span]:
        """Those of an attempt, with these names if any are given."""
        found = self.of(Span, uid=summary.uid, attempt=summary.attempt)
        return [span for span in found if not names or span.name in names]

    def sample(self, instance: object) -> Json:
        found = [sample for sample in self.samples if sample["instance_id"] == instance and not sample.get("fork")]
        assert len(found) == 1, found
        return found[0]

    def forks(self, instance: object) -> list[Json]:
        return [sample for sample in self.samples if sample["instance_id"] == instance and sample.get("fork")]


async def run_traced(
    buffer: Any,
    folder: Path,
    source: str,
    engine_url: str,
    rows: Sequence[str],
    *,
    is_traced: bool = True,
    rate: float = 1.0,
    meanwhile: Callable[[RecordedRun], Any] | None = None,
    kind: Any = RecordedRun,
    group_size: int = 1,
    workers: Sequence[int] = (),
    **payload: Any,
) -> Any:
    """A run with ``group_size`` rollouts for each row, which is an instance, a prompt and what is to be done.

    ``meanwhile`` is awaited while it runs; after it, the process is ended if it goes on.
    """
    run = kind(folder)
    generator = write_generator(folder / "tasks", source, "traced_generator.py")
    rows_file = folder / "rows.jsonl"
    rows_file.write_text("".join(f"{json.dumps({'instance_id': row, 'prompt': row})}\n" for row in rows))
    buffer.plan |= {"group_size": group_size}
    payload = {
        "remote_engine_url": engine_url,
        "remote_buffer_url": buffer.url,
        "input_file": str(rows_file),
        "num_repeat_per_sample": group_size,
        "num_process": 16,
        "run_id": RUN_ID,
        **payload,
    }
    settings = TraceSettings(folder=str(run.trace_dir), run_id=RUN_ID, rate=rate)
    recorded = msgspec.structs.asdict(settings) if is_traced else None
    copy = copy_code(generator, folder / "run")
    spec = RunSpec(str(copy), str(generator.parent), payload, trace=recorded, workers=list(workers))
    run.report = await _ended(run, spec, meanwhile)
    run.samples = buffer.samples
    return run


async def _ended(run: RecordedRun, spec: RunSpec, meanwhile: Callable[[RecordedRun], Any] | None) -> Report:
    process = await RunProcess.start(spec, run_dir=run.folder / "run", working_dir=run.folder, max_log_bytes=1 << 20)
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(LIMIT_S):
            if meanwhile is not None:
                await meanwhile(run)
            else:
                await asyncio.shield(ended)
    except TimeoutError:
        raise AssertionError(f"not within {LIMIT_S} s; its log:\n{run.log()}") from None
    finally:
        process.monitor.hang_up()  # it kills what is left
    return await ended
