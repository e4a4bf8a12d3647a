"""The demo, as somebody sees it who has just installed Forebay."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Forebay
from tests.kit import poll_until

LIMIT_S = 240.0
# As a shell does for what it runs in the foreground. The tests themselves may run where SIGINT is ignored: behind `&`.
IN_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.login_tty(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Marked:
    """Finds every process that a command has started, by a variable that they inherit."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environ = {**os.environ, "DEMO_TEST_MARK": self.mark}

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("DEMO_TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@pytest.fixture
def marked() -> Iterator[Marked]:
    found = Marked()
    yield found
    for process in found.processes():
        process.kill()


def command(folder: Path, num_instances: int) -> list[str]:
    return ["-m", "forebay.server.cli", "demo", "--data-dir", str(folder), "--num-instances", str(num_instances)]


def read_until(fd: int, text: str) -> str:
    """What comes until ``text`` is among it."""
    seen, until_s = "", time.monotonic() + LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while text not in seen:
            assert selector.select(max(0.0, until_s - time.monotonic())), f"no {text!r} in {seen!r}"
            try:
                part = os.read(fd, 4096)
            except OSError:  # so a terminal says that nobody has its other end any more
                part = b""
            assert part, f"it ended without {text!r}: {seen}"
            seen += part.decode(errors="replace")
    return seen


def test_it_uses_up_its_data_tells_the_result_and_leaves_no_process(tmp_path: Path, marked: Marked) -> None:
    arguments = [sys.executable, *command(tmp_path / "demo", 12)]
    ended = subprocess.run(
        arguments, env=marked.environ, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"groups 12 of 12 done", ended.stdout)
    assert re.search(r"samples in +96, 0 of them failed", ended.stdout)
    assert re.search(r"groups left +0", ended.stdout)
    assert f"Everything is kept in {tmp_path / 'demo'}" in ended.stdout
    assert (tmp_path / "demo" / "data" / "segments").is_dir()
    assert marked.processes() == []


@pytest.mark.soak
def test_ctrl_c_in_a_terminal_ends_everything_with_130(tmp_path: Path, marked: Marked) -> None:
    terminal, inner = os.openpty()
    wrapped = [sys.executable, "-c", IN_A_TERMINAL, str(inner), *command(tmp_path / "demo", 100)]
    with subprocess.Popen(wrapped, env=marked.environ, cwd=tmp_path, pass_fds=[inner]) as process:
        os.close(inner)
        read_until(terminal, "samples")
        assert len(marked.processes()) >= 3
        os.write(terminal, b"\x03")
        told = read_until(terminal, "The data is in")
        assert "Traceback" not in told
        assert process.wait(LIMIT_S) == 130
    os.close(terminal)
    assert marked.processes() == []


def test_sigterm_ends_everything(tmp_path: Path, marked: Marked) -> None:
    arguments = [sys.executable, *command(tmp_path / "demo", 100)]
    with subprocess.Popen(arguments, env=marked.environ, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), "starting the tiny engine")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert marked.processes() == []


@pytest.mark.soak
def test_nothing_outlives_a_demo_that_was_killed(tmp_path: Path, marked: Marked) -> None:
    arguments = [sys.executable, *command(tmp_path / "demo", 100)]
    with subprocess.Popen(arguments, env=marked.environ, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), "started run-")
        process.kill()
    poll_until(lambda: marked.processes() == [], LIMIT_S)


def test_it_wants_a_folder_of_its_own(forebay: Forebay, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = forebay("demo", "--data-dir", tmp_path)
    assert refused.code == 2
    assert "is not empty" in refused.err


def test_without_the_extra_it_says_how_to_install_it(
    forebay: Forebay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.core.lazy_names.find_spec", lambda package: None if package == "torch" else object())
    refused = forebay("demo", "--data-dir", tmp_path / "demo")
    assert refused.code == 1
    assert "pip install 'forebay[local]'" in refused.err
