"""The processes around the trainer: the engine and the server, each at the address that it had before."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from forebay.core.errors import EngineError, EngineUnavailable, InvalidInput
from forebay.server.cli.demo.children import Child, Children

READY_LIMIT_S = 120.0
UPDATE_LIMIT_S = 60.0


class Services:
    """Starts processes whose files lie in ``folder``, and knows their addresses.

    They end with this process, however it ends. After a restart they have the ports that they had: the run knows the
    engine by its address.
    """

    def __init__(self, folder: Path, children: Children) -> None:
        self._folder = folder
        self._children = children
        self._ports_path = folder / "ports.json"
        self._ports: dict[str, int] = json.loads(self._ports_path.read_text()) if self._ports_path.exists() else {}

    def start_engine(self, model_folder: Path) -> str:
        """Start the tiny engine with a model; its address."""
        return self._start("tiny engine", "forebay.engines.tiny", "--model-path", str(model_folder))

    def start_server(self) -> str:
        """Start the buffer's server; its address."""
        return self._start("server", "forebay.server.cli", "serve", "--data-dir", str(self._folder / "data"))

    def check_alive(self) -> None:
        """Raise ``ForebayError`` with the last log lines if one of them has ended."""
        self._children.check_alive()

    def _start(self, name: str, module: str, *arguments: str) -> str:
        words = [*arguments, "--host", "127.0.0.1", "--port", str(self._ports.get(name, 0))]
        log = self._folder / f"{name.replace(' ', '_')}.log"
        child: Child = self._children.start(name, module, *words, log=log, environ=_environment())
        url = _url(child.first_line(READY_LIMIT_S))
        self._ports[name] = int(url.rpartition(":")[2])
        draft = self._ports_path.with_suffix(".draft")
        draft.write_text(json.dumps(self._ports))
        draft.replace(self._ports_path)
        return url


def update_engine(url: str, model_folder: Path, version: int) -> None:
    """Have an engine take the weights in a folder, which it must be able to read. Raises ``EngineError``.

    SGLang ends the calls in flight, which the generator goes on with; the tiny engine lets them go on.
    """
    body = {"model_path": str(model_folder), "weight_version": str(version)}
    try:
        reply = httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=UPDATE_LIMIT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"no engine answers at {url}: {error}") from error
    if reply.is_error:
        raise EngineError(f"the engine at {url} refused {model_folder}: {reply.text}", status_code=reply.status_code)


def served_model(url: str) -> Path:
    """The folder of the model that an engine serves. Raises ``EngineUnavailable``, and ``InvalidInput`` where there is
    none on this machine.
    """
    try:
        reply = httpx.get(f"{url}/model_info", timeout=UPDATE_LIMIT_S, trust_env=False).raise_for_status()
        told = reply.json()["model_path"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        hint = "--engine takes the address of an SGLang, for example http://127.0.0.1:30000"
        raise EngineUnavailable(f"no SGLang tells its model at {url}: {error!r}", hint=hint) from error
    if not Path(told, "config.json").is_file():
        raise InvalidInput(
            f"the engine at {url} serves {told!r}, which is no model folder on this machine",
            hint="have it serve one (huggingface_hub.snapshot_download makes it): launch_server --model-path FOLDER",
        )
    return Path(told)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make ``folder``, and keep other loops out of it. Raises ``InvalidInput`` where it cannot be had."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for its end, or give another --dir"
            raise InvalidInput(f"another loop is running in {folder}", hint=hint) from None
        except OSError as error:
            hint = "give --dir a folder that can be written in"
            raise InvalidInput(f"{folder} cannot be used: {error.strerror}", hint=hint) from None
        yield


def _url(line: str) -> str:
    return str(json.loads(line)["url"]) if line.startswith("{") else line.rpartition(" ")[2]


def _environment() -> dict[str, str]:
    """Without settings meant for another server, and without a proxy for this machine's own addresses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return {**kept, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
