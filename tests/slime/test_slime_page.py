"""The commands of the pages about slime, as they stand there, in a folder laid out like slime's checkout."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.kit import first_line
from tests.slime import published_kit

ROOT = Path(__file__).parents[2]


def serve_commands(page: str) -> list[str]:
    return re.findall(r"^forebay (serve .*slime_plugins.*)$", (ROOT / page).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", ["docs/slime.md", "README.md"])
def test_the_command_starts_a_server_that_finds_the_generators(page: str, tmp_path: Path) -> None:
    published_kit.write_checkout(tmp_path)
    commands = serve_commands(page)
    assert commands, f"{page} has no command to start Forebay with"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    for command in commands:
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay.server.cli", *shlex.split(command), "--port", "0"],
            cwd=tmp_path / "slime",
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = first_line(process.stdout, 60)
            assert "forebay listens on" in line, f"{command} is refused"
            url = f"http://127.0.0.1:{line.rpartition(':')[2]}"
            found = {
                info["task_type"]: info["status"]
                for info in httpx.get(f"{url}/v1/generators", timeout=60).json()["generators"]
            }
            assert (found["workers"], found["epochs"]) == ("ok", "ok")
        finally:
            process.kill()
            process.communicate()
