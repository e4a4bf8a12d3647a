"""Another user of the machine, beside a Ray cluster that was started for one process."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

SECRET = secrets.token_hex(16)
"""What a worker prints."""
NOBODY = 65534
CONTROLLER = f"""
import json, os, sys
from forebay.workers.backends.ray import RayBackend
from forebay.workers.groups import ClassWithInitArgs, Dispatch, Worker, WorkerGroup, register

class Printer(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def show(self):
        print({SECRET!r}, flush=True)
        return os.getpid()

backend = RayBackend()
import ray
group = WorkerGroup([1], ClassWithInitArgs(Printer), backend=backend)
group.show()
print(json.dumps({{"address": ray.get_runtime_context().gcs_address}}), flush=True)
sys.stdin.readline()
group.close()
"""
NEIGHBOUR = f"""
import json, os, sys
from pathlib import Path
from ray._raylet import GcsClient
if os.getuid() == 0:
    os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
found = []
try:
    client = GcsClient(address=sys.argv[1])
    client.internal_kv_put(b"RemoteFunction:evil", b"evil", True, namespace=b"fun", timeout=10)
    found.append("the function table of the cluster")
except Exception as error:
    refused = str(error)
else:
    refused = ""
if os.getuid() == {NOBODY}:
    for path in (Path(folder, name) for top in sys.argv[2:] for folder, _, names in os.walk(top) for name in names):
        try:
            found += [str(path)] * (path.is_file() and {SECRET!r}.encode() in path.read_bytes())
        except OSError:
            pass
print(json.dumps({{"found": found, "refused": refused}}))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home that other users may look into, as it is by default on many systems; temporary files are there too."""
    folder = Path(tempfile.mkdtemp(prefix="fbhome", dir="/tmp"))  # the paths of Ray's sockets have to be short
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def address(home: Path) -> Iterator[str]:
    """Of the cluster that a controller has started for itself, a worker of which has printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER],
        env={**environ, "HOME": str(home), "TMPDIR": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as controller:
        assert controller.stdout is not None
        line = next((each for each in controller.stdout if each.startswith("{")), "{}")
        yield json.loads(line)["address"]
        controller.communicate("end\n", timeout=60)


def test_another_user_joins_no_cluster_of_a_process_and_reads_no_output_of_its_workers(
    home: Path, address: str
) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(home)}
    if (home / ".ray" / "auth_token").exists():  # without a token, Ray ends the process that is to have one
        environ["RAY_AUTH_MODE"] = "token"
    tried = subprocess.run(
        [sys.executable, "-c", NEIGHBOUR, address, str(home), "/dev/shm"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    seen: dict[str, Any] = json.loads(tried.stdout.splitlines()[-1])
    assert seen["found"] == [], tried.stderr
    assert "uthentication token" in seen["refused"], seen
