"""The processes around the trainer: the engine and the server, each at the address that it had before."""

import json
import os
from pathlib import Path

import httpx

from forebay.core.errors import EngineError, EngineUnavailable
from forebay.server.cli.children import Child, Children

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
    """The folder of the model that an engine serves. Raises ``EngineUnavailable``."""
    try:
        reply = httpx.get(f"{url}/model_info", timeout=UPDATE_LIMIT_S, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"no engine tells its model at {url}: {error}") from error
    return Path(reply.json()["model_path"])


def _url(line: str) -> str:
    return str(json.loads(line)["url"]) if line.startswith("{") else line.rpartition(" ")[2]


def _environment() -> dict[str, str]:
    """Without settings meant for another server, and without a proxy for this machine's own addresses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return {**kept, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
