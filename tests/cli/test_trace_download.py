"""What a server streams of a trace is taken apart into the files that it has."""

from pathlib import Path

from forebay.server.cli.trace_source import open_source
from forebay.telemetry.tracing.read_trace import trace_files
from forebay.telemetry.tracing.records import Weights
from forebay.telemetry.tracing.tracer import TraceSettings, start_tracing
from tests.kit import ServerProcess


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
        mine = [path for path in trace_files(folder) if path.name.startswith("gateway")]
        assert len(mine) >= 2
        for path in mine:
            assert (source.folder / path.name).read_bytes() == path.read_bytes()
        assert not (source.folder / "stream").exists()
