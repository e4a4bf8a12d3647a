"""What a server streams of a trace is read as the files that it has."""

from pathlib import Path

from forebay.server.cli.trace_source import open_source
from forebay.telemetry.trace_db import TraceDB
from forebay.telemetry.tracing.records import Weights
from forebay.telemetry.tracing.tracer import TraceSettings, start_tracing
from tests.kit import ServerProcess
from tests.telemetry.trace_kit import read_whole


def places(db: TraceDB) -> set[tuple[str, int]]:
    return {(line.writer.name, line.number) for line in db.of_run() if isinstance(line.record, Weights)}


def test_a_fetched_trace_has_the_files_of_the_server(server: ServerProcess, tmp_path: Path) -> None:
    run = server.start_run(group_size=2)
    folder = server.data_dir / "runs" / run.run_id / "trace"
    tracer = start_tracing(TraceSettings(folder=str(folder), run_id=run.run_id, max_bytes=1 << 10), "gateway")
    for version in range(4_000):  # several segments
        tracer.write(Weights(t=tracer.now(), what="announced", version=version))
        if version % 1_000 == 0:
            tracer.flush()
    tracer.close()
    run.stop()
    with open_source(run.run_id, server.url, data_dir=tmp_path) as source:
        there = places(read_whole(folder))
        assert len({file for file, _ in there}) >= 2
        assert places(read_whole(source.folder)) == there
