"""A real Chromium without a window and without a network, spoken to over a pipe in its DevTools protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",  # it does not start as root otherwise
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1280,1000",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 60.0


def chromium_path() -> str | None:
    """The browser of this machine, or of ``FOREBAY_CHROMIUM``; None where there is none."""
    return os.environ.get("FOREBAY_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One tab, whose network is off."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._in, self._out = read_fd, write_fd
        self._read = bytearray()
        self._number = 0
        self._session = ""
        self.errors: list[str] = []
        """What the page's console said of errors, exceptions, and refused or failed loads."""
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        self.dialogs: list[str] = []
        """What the page said in windows of its own."""

    def attach(self) -> Self:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._call("Network.emulateNetworkConditions", **offline)
        return self

    def open(self, file: Path) -> float:
        """Load it; the seconds until its first picture is drawn."""
        began = time.monotonic()
        self._call("Page.navigate", url=file.as_uri())
        self.wait_for("document.readyState === 'complete' && !!document.querySelector('[data-drawn]')")
        return time.monotonic() - began

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of what it promises."""
        reply = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until the condition holds, looked at by the page itself."""
        looking = f"""new Promise((done) => {{ const began = Date.now();
            const look = () => ({condition}) ? done(true)
                : Date.now() - began > 20000 ? done(false) : setTimeout(look, 20); look(); }})"""
        for _ in range(3):
            with suppress(_Navigated):
                assert self.evaluate(looking), condition
                return
        raise AssertionError(condition)

    def move_mouse(self, x: float, y: float, kind: str = "mouseMoved", button: str = "none") -> None:
        """To a place of the window, pressing or letting go of a button there."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """The left button from one place to another."""
        self.move_mouse(*begin)
        self.move_mouse(*begin, "mousePressed", "left")
        self.move_mouse((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2, button="left")
        self.move_mouse(*end, button="left")
        self.move_mouse(*end, "mouseReleased", "left")

    def screenshot(self, file: Path) -> None:
        """Of the whole page."""
        reply = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(reply["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                if "error" in reply and "navigat" in reply["error"]["message"]:
                    raise _Navigated
                assert "error" not in reply, (method, reply)
                return reply["result"]
            self._note(reply)

    def _next(self) -> dict[str, Any]:
        while (end := self._read.find(b"\0")) < 0:
            ready, _, _ = select.select([self._in], [], [], TIMEOUT_S)
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, "chromium is gone, or says nothing"
            self._read += part
        found: dict[str, Any] = json.loads(self._read[:end])
        del self._read[: end + 1]
        return found

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.errors.append(json.dumps(told["entry"]))
            case "Page.javascriptDialogOpening":
                self.dialogs.append(told["message"])
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])

    def close(self) -> None:
        self._session = ""
        with suppress(AssertionError, OSError):
            self._call("Browser.close")
        for each in (self._in, self._out):
            with suppress(OSError):
                os.close(each)


class _Navigated(Exception):
    """What was asked was lost with the document that it was asked of."""


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """A browser with a new profile in ``folder``, ended with the block."""
    path = chromium_path()
    assert path is not None
    # It reads commands from its descriptor 3 and writes replies to 4.
    (commands_read, commands_write), (replies_read, replies_write) = os.pipe(), os.pipe()
    command = f'exec "$0" "$@" 3<&{commands_read} 4>&{replies_write}'
    arguments = ["bash", "-c", command, path, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            arguments, pass_fds=(commands_read, replies_write), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    os.close(commands_read)
    os.close(replies_write)
    browser = Chromium(replies_read, commands_write)
    try:
        yield browser.attach()
    finally:
        browser.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
