"""The commands of SKILL.md work, one after another, as a coding agent would type them."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SKILL = (Path(__file__).parents[1] / "SKILL.md").read_text(encoding="utf-8")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def script(engine_port: int, server_port: int) -> str:
    """Every block of the page in its order, with free ports in place of the usual ones."""
    commands = ["set -eu"]
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", SKILL, re.MULTILINE | re.DOTALL):
        commands.append(block if language == "sh" else f"python3 - <<'PYTHON'\n{block}PYTHON\n")
    ports = {"30000": str(engine_port), "8889": str(server_port)}
    return re.sub("|".join(ports), lambda found: ports[found[0]], "\n".join(commands))


@pytest.mark.timeout(400)
def test_its_commands_run_one_after_another(tmp_path: Path) -> None:
    engine_port, server_port = free_port(), free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FOREBAY_PORT": str(server_port),
        "FOREBAY_URL": f"http://127.0.0.1:{server_port}",
    }
    shell = subprocess.Popen(
        ["bash", "-c", script(engine_port, server_port)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=360)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, printed
    assert (tmp_path / "first.fbr").exists()
