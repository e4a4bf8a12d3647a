"""``forebay trace export``: files and collectors."""

import json
import sys
from pathlib import Path

import pytest

from forebay.telemetry.tracing.records import Dropped
from tests.cli.conftest import Forebay
from tests.telemetry.log_kit import ZERO, make_log, rollout, write_log
from tests.telemetry.otlp_receiver import Receiver, receiver

__all__ = ["receiver"]

NOBODY = ("--url", "http://127.0.0.1:9")


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_is_drawn_into_a_file_of_its_name(forebay: Forebay) -> None:
    make_log(Path("forebay-data/runs/run-abc/trace"))
    done = forebay("trace", "export", "run-a", "--to", "perfetto", *NOBODY)
    assert (done.code, done.out) == (0, "run-abc.perfetto.json\n"), done.err
    assert "attempts of rollouts: 1" in done.err
    assert "ui.perfetto.dev" in done.err
    events = json.loads(Path("run-abc.perfetto.json").read_bytes())
    assert any(event["name"] == "slot 3" for event in events)


def test_no_file_is_overwritten(forebay: Forebay) -> None:
    make_log(Path("log"))
    Path("out.json").write_text("mine")
    done = forebay("trace", "export", "log", "--to", "perfetto", "--output", "out.json")
    assert (done.code, Path("out.json").read_text()) == (2, "mine")
    assert "out.json exists" in done.err
    nowhere = forebay("trace", "export", "log", "--to", "perfetto", "--output", "no/such/out.json")
    assert nowhere.code == 2
    assert "cannot be written: No such file or directory" in nowhere.err


@pytest.mark.parametrize("given", ["run-nobody", "no/such/folder", "."])
def test_what_is_not_there_is_told_in_one_line(forebay: Forebay, given: str) -> None:
    done = forebay("trace", "export", given, "--to", "perfetto", *NOBODY)
    assert done.code == 2
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["error", "hint"]
    assert list(Path().iterdir()) == []


def test_lines_that_were_left_out_are_counted_and_named(forebay: Forebay) -> None:
    write_log(Path("log"), "run", b"{broken\n", *rollout(), *[b'{"kind":"span","t":-1}\n'] * 12)
    done = forebay("trace", "export", "log", "--to", "perfetto")
    assert done.code == 0
    assert "13 lines were left out" in done.err
    assert "run-1-7.0.jsonl:2: not a record" in done.err
    assert "and 3 more" in done.err


def test_what_the_trace_lacks_is_told(forebay: Forebay) -> None:
    write_log(Path("log"), "run", Dropped(t=ZERO, spans=1_000, why="budget"), *rollout(), Dropped(t=ZERO, spans=234))
    done = forebay("trace", "export", "log", "--to", "perfetto")
    assert done.code == 0
    assert "1,234 spans and 0 summaries of rollouts are not in the trace" in done.err


def test_spans_go_to_the_collector_that_the_variables_name(forebay: Forebay, receiver: Receiver) -> None:
    make_log(Path("log"))
    done = forebay("trace", "export", "log", "--to", "otlp")
    assert done.code == 0, done.err
    assert f"{len(receiver.spans)} spans sent to {receiver.endpoint}" in done.err
    assert done.out == ""
    wrong = forebay("trace", "export", "log", "--to", "otlp", "--output", "x")
    assert wrong.code == 2
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in wrong.err


def test_without_the_extra_the_install_line_is_told(forebay: Forebay, monkeypatch: pytest.MonkeyPatch) -> None:
    make_log(Path("log"))
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    done = forebay("trace", "export", "log", "--to", "otlp")
    assert done.code == 1
    assert "pip install 'forebay[otel]'" in done.err


def test_a_collector_that_refuses_is_told(forebay: Forebay, receiver: Receiver) -> None:
    make_log(Path("log"))
    receiver.statuses = [401]
    done = forebay("trace", "export", "log", "--to", "otlp")
    assert done.code == 1
    assert "401" in done.err
    assert "OTEL_EXPORTER_OTLP_HEADERS" in done.err


def test_texts_are_sent_of_runs_alone(forebay: Forebay) -> None:
    make_log(Path("log"))
    for flags in (["run-a", "--to", "perfetto"], ["log", "--to", "otlp"]):
        refused = forebay("trace", "export", *flags, "--content", *NOBODY)
        assert (refused.code, "--content needs a run" in refused.err) == (2, True)
