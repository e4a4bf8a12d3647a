"""``forebay trace export``: files and collectors, once and while a run goes on."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.telemetry.tracing.records import Dropped
from tests.cli.conftest import Forebay
from tests.kit import poll_until
from tests.telemetry.log_kit import ZERO, delivery, make_log, moved, rollout, span, write_log
from tests.telemetry.otlp_receiver import Receiver

NOBODY = ("--url", "http://127.0.0.1:9")


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    with receiver.listening():
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        yield receiver


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
    assert "run-1-7.0.jsonl:2: no record" in done.err
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
    assert "status 401" in done.err
    assert "OTEL_EXPORTER_OTLP_HEADERS" in done.err


def test_following_ends_when_the_run_has_ended(forebay: Forebay, receiver: Receiver) -> None:
    log = Path("log")
    write_log(log, "run", *rollout()[:1])

    def grow() -> None:
        poll_until(lambda: len(receiver.spans) == 1)
        write_log(log, "run", *rollout()[1:])
        poll_until(lambda: len(receiver.spans) == 12)
        write_log(log, "server", *delivery())

    growing = threading.Thread(target=grow)
    growing.start()
    done = forebay("trace", "export", "log", "--to", "otlp", "--follow")
    growing.join()
    assert done.code == 0, done.err
    names = [each.name for each in receiver.spans]
    assert len(names) == 12 + 7
    assert names.count("attempt") == names.count("read") == 1


def test_ctrl_c_ends_following_with_a_whole_file(forebay: Forebay) -> None:
    log, out = Path("log"), Path("out.json")
    write_log(log, "run", *rollout(), span("tool", 60, 1, 50, up=0, uid="", group=""))

    def grow() -> None:
        poll_until(lambda: out.exists() and b"slot 3" in out.read_bytes())
        write_log(log, "run", span("parse", 70, 1, 51, up=0, uid="", group=""))
        poll_until(lambda: b"parse" in out.read_bytes().rpartition(b"slot 3")[2])
        os.kill(os.getpid(), signal.SIGINT)

    growing = threading.Thread(target=grow)
    growing.start()
    done = forebay("trace", "export", "log", "--to", "perfetto", "--follow", "--output", out)
    growing.join()
    assert done.code == 0, done.err
    assert {event["name"] for event in json.loads(out.read_bytes())} >= {"slot 3", "tool", "parse"}


def test_ctrl_c_while_the_collector_is_away_tells_what_was_not_sent(forebay: Forebay, receiver: Receiver) -> None:
    receiver.statuses = [503] * 1_000
    make_log(Path("log"))

    def interrupt() -> None:
        poll_until(lambda: receiver.num_asked >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    done = forebay("trace", "export", "log", "--to", "otlp", "--follow")
    interrupting.join()
    assert done.code == 1
    assert done.err.count("asking again") == 1
    assert "0 spans were sent, 19 more were not" in done.err


def test_a_trace_is_written_in_the_published_layout(forebay: Forebay) -> None:
    make_log(Path("log"))
    done = forebay("trace", "export", "log", "--to", "published", "--output", "out")
    assert (done.code, done.out) == (0, "out\n"), done.err
    (step,) = Path("out").iterdir()
    assert step.name == "step_67"
    events = {json.loads(line)["event"] for path in step.iterdir() for line in path.read_text().splitlines()}
    assert {"turn_engine_call", "reward_calculation", "async_rollout_request_complete"} <= events
    again = forebay("trace", "export", "log", "--to", "published", "--output", "out")
    assert again.code == 2
    assert "has a log already" in again.err
    back = forebay("trace", "export", "out", "--to", "perfetto")
    assert back.code == 2
    assert "published layout" in back.err


def test_steps_are_written_as_they_are_complete(forebay: Forebay) -> None:
    log, first = Path("log"), Path("out/step_67")
    write_log(log, "run", *rollout())
    write_log(log, "server", *delivery()[:-1])

    def grow() -> None:

        write_log(log, "run", *moved(rollout(), 100))
        write_log(log, "server", *moved(delivery()[:-1], 100))
        poll_until(first.exists)
        assert not Path("out/step_68").exists()
        os.kill(os.getpid(), signal.SIGINT)

    growing = threading.Thread(target=grow)
    growing.start()
    done = forebay("trace", "export", "log", "--to", "published", "--output", "out", "--follow")
    growing.join()
    assert done.code == 0, done.err
    assert sorted(path.name for path in Path("out").iterdir()) == ["step_67", "step_68"]
