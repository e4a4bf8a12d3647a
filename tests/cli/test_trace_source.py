"""``RUN|DIR``: from what somebody gives to the folder of a log."""

from pathlib import Path

import msgspec
import pytest

from forebay.core.errors import InvalidInput
from forebay.server.cli.trace_source import TraceSource, open_source
from forebay.telemetry.tracing.records import VERSION, Head

HEAD = Head(version=VERSION, run_id="run-1", process="run", start=1, pid=7, wall_ns=10**18, mono_ns=5)
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_trace(run: Path) -> Path:
    trace = run / "trace"
    trace.mkdir(parents=True)
    (trace / "run-1-7.0.jsonl").write_bytes(msgspec.json.encode(HEAD) + b"\n")
    return trace


def find(given: object, data_dir: Path | None = None) -> TraceSource:
    with open_source(str(given), NOBODY, data_dir=data_dir) as source:
        return source


def refusal(given: object, data_dir: Path | None = None) -> str:
    with pytest.raises(InvalidInput) as refused:
        find(given, data_dir)
    return refused.value.message


def test_a_folder_is_a_trace_a_run_or_a_data_directory(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "data" / "runs" / "run-a")
    for given in (trace, trace.parent, tmp_path / "data"):
        source = find(given)
        assert (source.title, source.folder, source.is_verl_log) == ("run-a", trace, False)


@pytest.mark.parametrize("below", [".", "a", "a/b"])
def test_a_verl_log_is_found_below_its_root(tmp_path: Path, below: str) -> None:
    step = tmp_path / "logs" / below / "step_0"
    step.mkdir(parents=True)
    (step / "worker_0.jsonl").write_text("{}\n")
    source = find(tmp_path / "logs")
    assert (source.folder, source.is_verl_log) == (tmp_path / "logs", True)


def test_of_several_runs_one_must_be_named(tmp_path: Path) -> None:
    for name in ("run-a", "run-b"):
        make_trace(tmp_path / "data" / "runs" / name)
    assert "run-a\n  run-b" in refusal(tmp_path / "data")
    assert "could be any of" in refusal("run-", tmp_path / "data")


def test_a_run_is_found_in_a_data_directory_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "data" / "runs" / "run-abc")
    assert find("run-a", tmp_path / "data").folder == trace


def test_without_a_server_the_usual_data_directory_is_looked_into(tmp_path: Path) -> None:
    make_trace(tmp_path / "forebay-data" / "runs" / "run-abc")
    assert find("run-abc").title == "run-abc"


def test_what_is_not_there_is_told_in_one_line_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    told = {
        "run-x": refusal("run-x"),
        "run-x in data": refusal("run-x", tmp_path),
        "folder": refusal("no/such/folder"),
        "empty": refusal("empty"),
        "": refusal(""),
    }
    assert "no server answers at http://127.0.0.1:9" in told["run-x"]
    assert "forebay-data/runs" in told["run-x"]
    assert f"{tmp_path}/runs" in told["run-x in data"]
    assert "no folder 'no/such/folder'" in told["folder"]
    assert "step_*/worker_*.jsonl" in told["empty"]
    assert all("\n" not in message for message in told.values())
