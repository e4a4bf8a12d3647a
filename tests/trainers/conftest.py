"""The real trainers, in the environment that install.sh made: tests run scripts of this folder there."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.tiny.model import ensure_model
from forebay.engines.tiny.recipe import Recipe
from tests.kit import interpreter

HERE = Path(__file__).parent
SCRIPT_S = 240.0
"""A script's limit; ten seconds are imports."""
ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Else its parts have 3.5 seconds to find each other, beside the imports of ten of Ray's processes.
    "TQ_STORAGE_HANDSHAKE_MAX_RETRIES": "100",
    "TQ_STORAGE_HANDSHAKE_TIMEOUT": "120",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
RunScript = Callable[..., Any]


@pytest.fixture(scope="session")
def trainers_python() -> str:
    """The interpreter of the environment that install.sh made."""
    return interpreter("FOREBAY_TRAINERS_PYTHON", "TRL and verl", "make test-trainers")


@pytest.fixture(scope="session")
def run_script(trainers_python: str) -> RunScript:
    """Runs a script with one argument, a JSON object of the keyword arguments; what it prints last is JSON, too.

    A script that kills itself, with the signal ``killed_by``, prints nothing.
    """

    def run(name: str, *, killed_by: int = 0, **given: Any) -> Any:
        command = [trainers_python, HERE / name, json.dumps(given)]
        ended = subprocess.run(
            command, env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=SCRIPT_S, check=False
        )
        assert ended.returncode == -killed_by, f"{name} failed:\n{ended.stdout[-2_000:]}\n{ended.stderr[-6_000:]}"
        return {} if killed_by else json.loads(ended.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def trl_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    recipe = Recipe(hidden_size=32, intermediate_size=64, num_layers=1, max_steps=1)
    return str(ensure_model(tmp_path_factory.mktemp("trl") / "model", recipe))
