"""What the browser is shown comes from the wheel, not from the checkout."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.kit import ServerProcess, interpreter

WHERE = "import forebay.server.ui as ui, sysconfig; print(ui.__file__, sysconfig.get_path('purelib'))"


def test_the_servers_run_the_wheel_without_the_checkout(server: ServerProcess) -> None:
    python = interpreter("FOREBAY_SERVER_PYTHON", "the wheel", "make test-browser")
    assert python != sys.executable
    told = subprocess.run([python, "-P", "-c", WHERE], check=True, capture_output=True, text=True, cwd="/").stdout
    module, site = told.split()
    assert module.startswith(f"{site}/forebay/")
    process = psutil.Process(server.pid)
    loaded = [file.path for file in process.memory_maps() if "/site-packages/" in file.path]
    assert loaded
    assert [path for path in loaded if not path.startswith(site)] == []
    assert "PYTHONPATH" not in process.environ()
    assert not Path(process.cwd()).is_relative_to(Path(__file__).parents[2])
    for file in (Path(module).parent / "assets").iterdir():
        assert server.client.get(f"/ui/{file.name}").content == file.read_bytes()
