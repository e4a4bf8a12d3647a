"""The embedded engine's tests share one model, made once, and one server process."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from forebay.engines.tiny.model import LoadedModel, ensure_model, load_model

START_LIMIT_S = 180.0


def read_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """One line of the process's output, waited for no longer than the limit."""
    assert process.stdout is not None
    line, end = b"", time.monotonic() + limit_s
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        assert readable, f"no line within {limit_s} s"
        byte = os.read(process.stdout.fileno(), 1)
        assert byte, f"the process ended with {process.wait(5)}"
        line += byte
    return line


@contextmanager
def running_engine(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A real engine process and its URL; killed at the end if it still runs."""
    command = [sys.executable, "-m", "forebay.engines.tiny", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            ready = json.loads(read_line(process, START_LIMIT_S))
            assert ready["event"] == "ready"
            yield process, ready["url"]
        finally:
            process.kill()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once for all processes of this test run: whoever comes second waits for it."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return ensure_model(shared / "tiny-model")


@pytest.fixture(scope="session")
def loaded(model_folder: Path) -> LoadedModel:
    return load_model(model_folder)


StartEngine = Callable[..., AbstractContextManager[tuple[subprocess.Popen[bytes], str]]]


@pytest.fixture
def start_engine() -> StartEngine:
    return running_engine


@pytest.fixture(scope="session")
def engine_url(model_folder: Path) -> Iterator[str]:
    with running_engine("--model-path", str(model_folder)) as (_, url):
        yield url


@pytest.fixture(scope="session")
def changing_engine_url(model_folder: Path) -> Iterator[str]:
    """An engine whose weights and pauses are a test's own to change."""
    with running_engine("--model-path", str(model_folder)) as (_, url):
        yield url


@pytest.fixture
def own_engine_url(changing_engine_url: str, model_folder: Path) -> str:
    """That engine, idle and with the weights that it was started with, whatever the test before has left."""
    start = {"model_path": str(model_folder), "weight_version": "default", "abort_all_requests": True}
    with httpx.Client(base_url=changing_engine_url, timeout=START_LIMIT_S) as http:
        http.post("/continue_generation").raise_for_status()
        http.post("/update_weights_from_disk", json=start).raise_for_status()
    return changing_engine_url


@pytest.fixture(scope="session")
def other_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, wider awake: its weights differ, its shape does not."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model_folder, folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.model.embed_tokens.weight.data.mul_(-1.5)
    network.save_pretrained(folder)
    return folder


@pytest.fixture
async def client(engine_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{engine_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
async def http(engine_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine_url, timeout=30) as http:
        yield http


@pytest.fixture
def num_running(http: httpx.AsyncClient) -> Callable[[], Awaitable[int]]:
    async def ask() -> int:
        (load,) = (await http.get("/v1/loads")).json()["loads"]
        return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])

    return ask
