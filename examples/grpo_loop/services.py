"""The processes around the trainer: the engine and the server, which keep their addresses over restarts."""

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
    """Starts processes whose files are in ``folder``, and stores their ports.

    The processes end with this process, however it ends. After a restart they get the same ports, because the run
    identifies the engine by its address.
    """

    def __init__(self, folder: Path, children: Children) -> None:
        self._folder = folder
        self._children = children
        self._ports_path = folder / "ports.json"
        self._ports: dict[str, int] = json.loads(self._ports_path.read_text()) if self._ports_path.exists() else {}

    def start_engine(self, model_folder: Path) -> str:
        """Start the tiny engine with a model, and return its address."""
        return self._start("tiny engine", "forebay.engines.tiny", "--model-path", str(model_folder))

    def start_server(self) -> str:
        """Start the buffer's server, and return its address."""
        return self._start("server", "forebay.server.cli", "serve", "--data-dir", str(self._folder / "data"))

    def check_alive(self) -> None:
        """Raise ``ForebayError`` with the last log lines if one of the processes has ended."""
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
    """Load the weights in a folder into an engine that no run uses yet. Raises ``EngineError``.

    The engine must be able to read the folder.
    """
    body = {"model_path": str(model_folder), "weight_version": str(version)}
    try:
        reply = httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=UPDATE_LIMIT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"the engine at {url} does not answer: {error}") from error
    if reply.is_error:
        raise EngineError(f"the engine at {url} rejected {model_folder}: {reply.text}", status_code=reply.status_code)


def served_model(url: str) -> Path:
    """The folder of an engine's model. Raises ``EngineUnavailable``, or ``InvalidInput`` if this machine lacks it."""
    try:
        reply = httpx.get(f"{url}/model_info", timeout=UPDATE_LIMIT_S, trust_env=False).raise_for_status()
        folder = reply.json()["model_path"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        hint = "--engine takes the address of an SGLang server, for example http://127.0.0.1:30000"
        raise EngineUnavailable(f"cannot get the model of an SGLang server at {url}: {error!r}", hint=hint) from error
    if not Path(folder, "config.json").is_file():
        raise InvalidInput(
            f"the engine at {url} serves {folder!r}, which is not a model folder on this machine",
            hint="make one with huggingface_hub.snapshot_download, and serve it: launch_server --model-path FOLDER",
        )
    return Path(folder)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Create ``folder``, and lock it against other loops. Raises ``InvalidInput`` if that is impossible."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait until it ends, or use another --dir"
            raise InvalidInput(f"another loop is running in {folder}", hint=hint) from None
        except OSError as error:
            hint = "use a writable folder for --dir"
            raise InvalidInput(f"{folder} cannot be used: {error.strerror}", hint=hint) from None
        yield


def _url(line: str) -> str:
    return str(json.loads(line)["url"]) if line.startswith("{") else line.rpartition(" ")[2]


def _environment() -> dict[str, str]:
    """The environment without settings for another server, and without a proxy for this machine's addresses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return {**kept, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
