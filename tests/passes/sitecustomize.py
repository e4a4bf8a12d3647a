"""With this folder on its PYTHONPATH, a Python process notes which files of the product it enters.

A file is entered when one of its functions is called, in whichever thread; the code of modules and classes, which runs
when they are imported, is no function, and what goes on after an ``await`` is not entered again. Other processes ask on
a socket in ``$FILES_PASSED`` that is named after the process.
"""

import dis
import inspect
import os
import sys
import threading
import time
from multiprocessing.connection import Listener
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
NO_PRODUCT = {"tests", "examples", "docs"}
RESUME = dis.opmap["RESUME"]

_entered: dict[CodeType, float] = {}
"""When each function was first called since ``begin``, in seconds that all processes of the machine count alike."""


def begin() -> None:
    """Forget what was entered so far."""
    _entered.clear()


def passed(until_s: float = float("inf")) -> list[str]:
    """The files entered since ``begin``, below the root of the repository."""
    codes = [code for code, at_s in _entered.copy().items() if at_s <= until_s and code.co_flags & inspect.CO_OPTIMIZED]
    return sorted({name for code in codes if (name := _product_name(code.co_filename))})


def _product_name(file: str) -> str:
    """The path below the root; empty for a file that is no part of the product."""
    path = Path(file).resolve()  # the packages may be reached by a link
    if not path.is_relative_to(ROOT):
        return ""
    below = path.relative_to(ROOT)
    return "" if below.parts[0] in NO_PRODUCT or below.parts[0].startswith(".") else str(below)


def _note(frame: FrameType, event: str, _: object) -> None:
    code, at = frame.f_code, frame.f_lasti
    # A coroutine that goes on is a "call" as well: its argument of RESUME tells them apart.
    if event == "call" and code not in _entered and code.co_code[at] == RESUME and not code.co_code[at + 1] & 3:
        _entered[code] = time.monotonic()


def _answer(listener: Listener) -> None:
    while True:
        with listener.accept() as connection:
            files = passed(connection.recv()), passed()
            begin()
            connection.send(files)


if "FILES_PASSED" in os.environ:
    _listener = Listener(f"{os.environ['FILES_PASSED']}/{os.getpid()}")
    threading.Thread(target=_answer, args=(_listener,), name="files-passed", daemon=True).start()
    threading.setprofile(_note)
    sys.setprofile(_note)
