"""The client can be installed beside trainers and engines: pip finds versions of everything that all of them accept."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.install.conftest import build_wheel, call

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(700)]

BESIDE = ("sglang==0.5.23", "trl==1.16.0", "verl==0.9.1", "vllm==0.33.0")


def resolve(folder: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Ask pip what it would install; it reads no more of a wheel than its metadata."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += [
        "--use-feature=fast-deps",
        "--report",
        str(folder / f"{Path(requirements[0]).name}.json"),
        *requirements,
    ]
    environ = {**os.environ, "PYTHONPATH": str(folder / "pip")}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)


def test_the_client_resolves_beside_each_and_the_server_not_beside_sglang(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    # A pip that, with --dry-run, downloads no wheel whose metadata it has read already.
    call(sys.executable, "-m", "pip", "install", "-q", "--target", tmp_path / "pip", "pip>=26", cwd=tmp_path)
    with ThreadPoolExecutor() as pool:
        conflict = pool.submit(resolve, tmp_path, f"{wheel}[server]", BESIDE[0])
        resolved = dict(zip(BESIDE, pool.map(lambda each: resolve(tmp_path, each, str(wheel)), BESIDE), strict=True))
    for each, ended in resolved.items():
        assert ended.returncode == 0, ended.stderr
        report = json.loads((tmp_path / f"{each}.json").read_text())
        found = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}
        name, _, version = each.partition("==")
        assert found[name] == version
        assert {"forebay", "httpx", "msgspec"} <= set(found)
    assert conflict.result().returncode == 1
    assert "conflicting dependencies" in conflict.result().stderr
