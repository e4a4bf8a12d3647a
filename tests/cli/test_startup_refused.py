"""A server that cannot start says why in one line."""

import subprocess
import sys

from tests.kit import ServerProcess


def test_a_data_directory_in_use_is_told_without_a_traceback(server: ServerProcess) -> None:
    arguments = ["serve", "--port", "0", "--data-dir", str(server.data_dir)]
    command = [sys.executable, "-m", "forebay.server.cli", *arguments]
    ended = subprocess.run(command, cwd=server.directory, check=False, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert "another process is using it" in ended.stderr
    assert "Traceback" not in ended.stderr
