"""What a worker has on a machine without the run's folder: the code that came along, a trace that the lead writes."""

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput
from forebay.generators.process.spec import RunSpec
from forebay.telemetry.tracing.records import ProcessChange
from forebay.telemetry.tracing.run_tracer import Tracer, TraceSettings
from forebay.telemetry.tracing.tracer import start_tracing
from forebay.workers.rollouts.orders import TraceLines
from forebay.workers.rollouts.other_nodes import NeededAddresses, has_code, out_of_reach, pack_code, unpacked
from forebay.workers.rollouts.remote_traces import ReceivedTrace, SentTrace


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    code = tmp_path / "run" / "code"
    (code / "data").mkdir(parents=True)
    (code / "a_generator.py").write_text("import helper\n")
    (code / "data" / "words.txt").write_text("a b\n")
    (code / "large.bin").symlink_to("/nowhere/large.bin")
    packages = tmp_path / "run" / "packages" / "outer"
    packages.mkdir(parents=True)
    (packages / "inner").symlink_to("../../code")
    return RunSpec(str(code / "a_generator.py"), str(tmp_path), {})


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_code_is_unpacked_with_its_files_links_and_package_names(spec) -> None:
    packed = pack_code(spec)
    Path(spec.module_path).parents[1].rename(Path(spec.module_path).parents[2] / "elsewhere")
    assert not has_code(spec)
    own = unpacked(spec, packed)
    assert has_code(own)
    code = Path(own.module_path).parent
    assert (code / "data" / "words.txt").read_text() == "a b\n"
    assert (code / "large.bin").readlink() == Path("/nowhere/large.bin")
    assert (code.parent / "packages" / "outer" / "inner" / "a_generator.py").samefile(own.module_path)


def test_code_stays_while_its_process_lives_and_goes_with_the_next_one(spec, temporary) -> None:
    packed = pack_code(spec)
    script = (
        "import sys, tempfile; from forebay.generators.process.spec import RunSpec\n"
        "from forebay.workers.rollouts.other_nodes import unpacked\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "print(unpacked(RunSpec(sys.argv[2], '', {}), sys.stdin.buffer.read()).module_path)\n"
    )
    command = [sys.executable, "-c", script, str(temporary), spec.module_path]
    left = Path(subprocess.run(command, input=packed, capture_output=True, check=True).stdout.decode().strip())
    assert left.exists()
    first = unpacked(spec, packed)
    assert not left.exists()
    second = unpacked(spec, packed)
    assert has_code(first)
    assert has_code(second)


def test_the_lines_of_a_trace_are_written_by_the_lead(tmp_path) -> None:
    settings = TraceSettings(str(tmp_path / "trace"), "run-sent", max_bytes=1 << 20)
    lead = start_tracing(settings, "run")
    sent: list[TraceLines] = []
    worker = Tracer(settings, "run", lambda _, head: SentTrace(head, sent.append))
    for _ in range(2):
        worker.write(ProcessChange(t=worker.now(), what="started"))
        worker.flush()
    worker.close()
    received = ReceivedTrace()
    for lines in sent:
        received.append(lines)
    received.close()
    lead.close()
    (written,) = (tmp_path / "trace").iterdir()
    kinds = [json.loads(line)["kind"] for line in written.read_text().splitlines()]
    assert (kinds, len(sent)) == (["head", "process", "process"], 2)


def test_a_trace_that_cannot_be_written_costs_nothing(tmp_path) -> None:
    (tmp_path / "trace").write_text("no folder")
    lead = start_tracing(TraceSettings(str(tmp_path / "trace"), "run-full", max_bytes=1 << 20), "run")
    received = ReceivedTrace()
    for _ in range(2):
        received.append(TraceLines(b"{}", b"x\n"))
    received.close()
    lead.close()


async def test_an_address_at_which_nobody_listens_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there = ("public_url", f"http://127.0.0.1:{listening.getsockname()[1]}/w/key")
        gone = ("remote_engine_url", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert await out_of_reach([there, gone]) == [gone]


def test_an_address_of_one_machine_is_refused_where_there_are_others() -> None:
    payload = {"remote_buffer_url": "http://10.0.0.1:8889/w/key", "remote_engine_url": "http://user:pw@127.0.0.1:1"}
    with pytest.raises(InvalidInput, match="cannot reach the engine at http://127") as refused:
        NeededAddresses(payload, has_others=True)
    assert (refused.value.field, bool(refused.value.hint)) == ("remote_engine_url", True)
    assert "pw" not in str(refused.value)
    alone = NeededAddresses(payload, has_others=False)
    assert alone.addresses[0] == ("public_url", "http://10.0.0.1:8889")
