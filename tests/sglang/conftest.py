"""The real SGLang engine and router, started once for all tests marked ``sglang``."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.generators.conftest import FakeBuffer
from tests.kit import interpreter

HERE = Path(__file__).parent
START_S = 240.0
STOP_S = 20.0
ENGINE_OPTIONS: dict[str, object] = {
    "--served-model-name": "tiny",
    "--device": "cpu",
    "--dtype": "float32",
    "--host": "127.0.0.1",
    "--log-level": "warning",
    "--random-seed": 1,
    # Else it reserves gigabytes for the cache.
    "--max-total-tokens": 20000,
    "--max-running-requests": 16,
    "--chunked-prefill-size": 512,
}
# Without the first its scheduler takes a whole core while it has nothing to do.
ENGINE_FLAGS = ["--sleep-on-idle", "--skip-server-warmup", "--enable-metrics"]


@pytest.fixture
async def buffer() -> AsyncIterator[FakeBuffer]:
    """A buffer in this process."""
    async with FakeBuffer().served() as fake:
        yield fake


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of the environment that install.sh made."""
    return interpreter("FOREBAY_SGLANG_PYTHON", "SGLang", "make test-sglang")


@pytest.fixture(scope="session")
def sglang_model(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model folder."""
    return make_model(sglang_python, tmp_path_factory.mktemp("sglang"), "dense")


@pytest.fixture(scope="session")
def sglang_url(sglang_python: str, sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real engine. It is shared: leave it idle."""
    with engine_with(sglang_python, sglang_model, tmp_path_factory.mktemp("sglang") / "engine.log") as url:
        yield url


@pytest.fixture(scope="session")
def changing_url(sglang_python: str, sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine whose weights a test may change, and finds changed."""
    with engine_with(sglang_python, sglang_model, tmp_path_factory.mktemp("sglang") / "engine.log") as url:
        yield url


@pytest.fixture(scope="session")
def moe_model(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random mixture of experts."""
    return make_model(sglang_python, tmp_path_factory.mktemp("sglang"), "moe")


@pytest.fixture(scope="session")
def moe_engine(sglang_python: str, moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an engine that tells the routed experts of ``moe_model``."""
    log = tmp_path_factory.mktemp("sglang") / "engine.log"
    with engine_with(sglang_python, moe_model, log, "--enable-return-routed-experts") as url:
        yield url


@pytest.fixture(scope="session")
def sglang_router_url(sglang_python: str, sglang_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real router before that engine."""
    port = free_port()
    options = ["--worker-urls", sglang_url, "--prometheus-port", free_port(), "--log-level", "warn"]
    command = [sglang_python, HERE / "launch_router.py", "--host", "127.0.0.1", "--port", port, *options]
    with running(command, tmp_path_factory.mktemp("sglang") / "router.log"):
        url = f"http://127.0.0.1:{port}"
        # Its list of workers is empty until it has asked them for their model.
        wait_until_ok(f"{url}/v1/models")
        yield url


def make_model(python: str, folder: Path, kind: str) -> Path:
    """The folder of a model that make_model.py describes."""
    command = [python, HERE / "make_model.py", folder / kind, kind]
    subprocess.run(command, check=True, timeout=START_S, capture_output=True)
    return folder / kind


@contextmanager
def engine_with(python: str, model: Path, log: Path, *flags: str, **environ: str) -> Iterator[str]:
    """A real engine that serves a model folder; its address."""
    port = free_port()
    options = {**ENGINE_OPTIONS, "--model-path": model, "--port": port}
    words = [word for option in options.items() for word in option]
    with running([python, HERE / "launch_engine.py", *words, *ENGINE_FLAGS, *flags], log, **environ):
        url = f"http://127.0.0.1:{port}"
        wait_until_ok(f"{url}/model_info")
        yield url


def free_port() -> int:
    """A loopback port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[object], log: Path, **variables: str) -> Iterator[None]:
    """Run ``command`` in a process group of its own, and end the whole group."""
    with log.open("wb") as output:
        # Several torch threads for so small a model wait for each other, on a busy machine most of the time.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        process = subprocess.Popen(
            [*map(str, command)], stdout=output, stderr=output, start_new_session=True, env=environ
        )
    try:
        yield
    except BaseException as error:
        error.add_note(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for whoever is left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)


def wait_until_ok(url: str, limit_s: float = START_S) -> None:
    """Ask until the answer is a 200 with a body."""
    deadline_s = time.monotonic() + limit_s
    with httpx.Client(timeout=5) as http:
        while time.monotonic() < deadline_s:
            with suppress(httpx.TransportError):
                if http.get(url).status_code == httpx.codes.OK:
                    return
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {limit_s:g} s")
