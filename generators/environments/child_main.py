"""Main of an environment's child. Runs with another Python, so it imports nothing of Forebay.

``python child_main.py MODULE_FILE MIN_PYTHON PACKAGES SOCKET_FD PARENT_PID``. ``MODULE_FILE`` defines ``serving``, an
async context manager over the settings (the first message), whose value is a dictionary of methods: coroutine functions
with keyword arguments. Messages have the frames of ``core/processes/parent_link.py``. The parent sends ``{"id",
"method", "params"}``, or ``{"id"}`` to cancel a call. The child sends ``{"id", "result"}`` or ``{"id", "error"}``. The
id of its start is 0.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import util
from typing import Any

HEADER_BYTES = 8
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve calls until the parent hangs up."""
    module_file, min_python, packages, descriptor, parent_pid = arguments
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent_pid):
        sys.exit(1)
    os.set_inheritable(int(descriptor), False)
    del sys.path[0]  # the folder of this file must not shadow packages
    link = socket.socket(fileno=int(descriptor))
    if problem := _problem(min_python, packages.split(",")):
        # By hand, because msgspec may be what is missing: {"id": 0, "missing": problem}
        text = problem.encode()
        body = b"\x82\xa2id\x00\xa7missing\xda" + len(text).to_bytes(2, "big") + text
        link.sendall(len(body).to_bytes(HEADER_BYTES, "big") + body)
        return
    asyncio.run(_serve(link, module_file))


def _problem(min_python: str, packages: list[str]) -> str:
    if sys.version_info < tuple(map(int, min_python.split("."))):
        return f"is Python {sys.version_info[0]}.{sys.version_info[1]}, but Python {min_python} or later is needed"
    missing = [name for name in packages if util.find_spec(name) is None]
    return f"lacks {' and '.join(missing)}" if missing else ""


async def _serve(link: socket.socket, module_file: str) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    child = _Child(writer)
    settings = await _receive(reader)
    try:
        async with _load(module_file).serving(settings) as child.methods:
            child.send(id=0)
            with suppress(asyncio.IncompleteReadError):
                while True:
                    child.handle(await _receive(reader))
            await child.cancel_all()
    except Exception as error:  # noqa: BLE001 -- whatever the environment raises at its start is the answer
        traceback.print_exc()
        child.send(id=0, error=_shown(error))
        await writer.drain()


class _Child:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.methods: dict[str, Any] = {}
        self._writer = writer
        self._calls: dict[int, asyncio.Task[None]] = {}

    def send(self, **message: Any) -> None:
        from msgspec import msgpack

        body = msgpack.encode(message)
        self._writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

    def handle(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "method" in message:
            self._calls[number] = asyncio.create_task(self._call(number, message["method"], message["params"]))
            self._calls[number].add_done_callback(lambda _: self._calls.pop(number))
        elif number in self._calls:
            self._calls[number].cancel()

    async def cancel_all(self) -> None:
        calls = list(self._calls.values())
        for call in calls:
            if not call.cancelling():  # a second cancellation would interrupt its closing
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, number: int, method: str, params: dict[str, Any]) -> None:
        try:
            self.send(id=number, result=await self.methods[method](**params))
        # Also what ends programs and tasks: it must not end other calls, or leave this one open.
        except BaseException as error:  # noqa: BLE001 -- any error of the environment is the answer
            if not self._calls[number].cancelling():
                traceback.print_exc()
            self.send(id=number, error=_shown(error))


async def _receive(reader: asyncio.StreamReader) -> Any:
    from msgspec import msgpack

    length = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
    return msgpack.decode(await reader.readexactly(length))


def _load(module_file: str) -> Any:
    spec = util.spec_from_file_location("environment", module_file)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"  # one line, as errors of runs are shown


if __name__ == "__main__":
    main(sys.argv[1:])
