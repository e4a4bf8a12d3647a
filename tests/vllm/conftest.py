"""The real vLLM, started once for all tests marked ``vllm``."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import interpreter
from tests.sglang.conftest import free_port, make_model, running, wait_until_ok

HERE = Path(__file__).parent
# Its start takes some minutes on a busy machine.
START_S = 480.0
OPTIONS = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"]
FLAGS = ["--enable-scale-out", "--enforce-eager", "--generation-config", "vllm", "--host", "127.0.0.1"]
ENVIRON = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(HERE / "site"),
}
MAIN = "from vllm.entrypoints.cli.main import main; main()"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of the environment that install.sh made."""
    return interpreter("FOREBAY_VLLM_PYTHON", "vLLM", "make test-vllm")


@pytest.fixture(scope="session")
def vllm_model(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model folder."""
    return make_model(vllm_python, tmp_path_factory.mktemp("vllm"), "wide")


@pytest.fixture(scope="session")
def vllm_url(vllm_python: str, vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real engine. It is shared: leave it idle, with the weights of its model."""
    port = free_port()
    command = [vllm_python, "-c", MAIN, "serve", vllm_model, *OPTIONS, *FLAGS, "--port", port]
    with running(command, tmp_path_factory.mktemp("vllm") / "engine.log", **ENVIRON):
        url = f"http://127.0.0.1:{port}"
        wait_until_ok(f"{url}/version", START_S)
        wait_until_ok(f"{url}/server_info")  # which takes seconds to make, and is kept
        yield url
