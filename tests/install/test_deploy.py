"""What deploy/ and the Containerfile start is there, and accepts what they set. No cluster, no container."""

import json
import os
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from forebay.core.settings import Settings
from tests.install.conftest import ROOT, Environment
from tests.kit import TIME_LIMIT_S, ServerProcess, first_line, poll_until

CONTAINERFILE = (ROOT / "Containerfile").read_text()
EXTRAS = re.search(r"\.whl\)\[(.+?)\]", CONTAINERFILE)[1]  # type: ignore[index]
SLURM = ROOT / "deploy" / "forebay.slurm"
ENV = dict(each.split("=") for each in re.search(r"^ENV (.+)$", CONTAINERFILE, re.M)[1].split())  # type: ignore[index]


@pytest.fixture
def environ(environment: Environment, tmp_path: Path) -> dict[str, str]:
    """The variables of a shell that has what the container installs."""
    path = f"{tmp_path}:{environment(EXTRAS).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "FOREBAY_DATA_DIR": str(tmp_path / "data"), "FOREBAY_PORT": str(free_port())}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_the_command_of_the_container_serves_with_its_variables(environ: dict[str, str], tmp_path: Path) -> None:
    assert all(name.removeprefix("FOREBAY_").lower() in Settings.model_fields for name in ENV)
    (command,) = re.findall(r"^CMD (.+)$", CONTAINERFILE, re.M)
    (tmp_path / "tasks").mkdir()
    given = {**ENV, **environ, "FOREBAY_GENERATORS": str(tmp_path / "tasks"), "FOREBAY_TOKEN": "secret"}
    url = f"http://127.0.0.1:{environ['FOREBAY_PORT']}"
    with subprocess.Popen(json.loads(command), env=given, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            assert first_line(server.stdout, 60).startswith("forebay listens on http://")
            with httpx.Client(base_url=url, timeout=TIME_LIMIT_S) as client:
                assert client.get("/v1/runs").status_code == 401
                for path in ("/ui/", "/ui/main.mjs", "/ui/page.css"):
                    assert client.get(path).status_code == 200
                listed = client.get("/v1/runs", headers={"Authorization": "Bearer secret"}).json()
            assert listed["storage"]["location"] == environ["FOREBAY_DATA_DIR"]
        finally:
            server.terminate()
    assert server.returncode == 0


def test_the_manifest_asks_what_a_server_answers(server: ServerProcess) -> None:
    service, stateful = yaml.safe_load_all((ROOT / "deploy" / "forebay.yaml").read_text())
    assert (service["kind"], stateful["kind"]) == ("Service", "StatefulSet")
    assert stateful["spec"]["selector"]["matchLabels"] == stateful["spec"]["template"]["metadata"]["labels"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert server.client.get(container[probe]["httpGet"]["path"]).status_code == 200
    assert {each["mountPath"] for each in container["volumeMounts"]} == {
        ENV["FOREBAY_DATA_DIR"],
        ENV["FOREBAY_GENERATORS"],
    }
    values: dict[str, Any] = {each["name"]: each.get("value", "token") for each in container["env"]}
    settings = Settings(**{name.removeprefix("FOREBAY_").lower(): value for name, value in values.items()})
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert ports == {"http": settings.port, "gateway": settings.gateway_port}
    assert {settings.public_url, settings.gateway_url} == {
        f"http://forebay-0.forebay:{port}" for port in ports.values()
    }


def test_the_slurm_job_ends_with_its_command_and_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    for name, lines in {
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexport SLURM_PROCID=0\nexec "$@"',
        "ray": f'echo "$@" >> {tmp_path}/ray.log\nexec sleep 600',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    subprocess.run(["bash", "-n", SLURM], check=True)
    command = ["bash", SLURM, "bash", "-c", "forebay status --json && exit 3"]
    environ["SLURMD_NODENAME"] = "127.0.0.1"
    job = subprocess.Popen(
        command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    printed, _ = job.communicate(timeout=100)
    assert job.returncode == 3
    assert '"runs"' in printed
    assert "forebay listens on" in printed
    assert (tmp_path / "ray.log").read_text() == "start --block --head --port 6379\n"
    poll_until(lambda: not in_session(job.pid))


def in_session(session: int) -> list[int]:
    """The processes of a session; those of other tests come and go."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):  # it has ended since it was listed
            if os.getsid(pid) == session:
                found.append(pid)
    return found
