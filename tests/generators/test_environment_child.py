"""The child that runs an environment with another Python: here a small environment, and this Python."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from forebay.core.errors import InvalidInput
from forebay.generators.environments.child import PYTHON_VARIABLE, EnvironmentChild, EnvironmentLibrary
from forebay.generators.failures import EnvironmentFailed
from tests.kit import poll_until

ENVIRONMENT = """
import asyncio, contextlib, os, subprocess, sys
from pathlib import Path

@contextlib.asynccontextmanager
async def serving(settings):
    if settings.get("wrong"):
        raise ValueError("wrong is wrong")
    folder = Path(settings["folder"])

    async def add(a, b):
        return a + b

    async def fail():
        raise LookupError("no such row")

    async def leave(how):
        raise {"exit": SystemExit, "cancel": asyncio.CancelledError}[how]("no credit")

    async def die():
        os._exit(3)

    async def wait():
        program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
        (folder / "waiting").write_text(str(program.pid))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            (folder / "cancelled").touch()
            while settings.get("is_slow") and not (folder / "may_close").exists():
                await asyncio.sleep(0.01)
            raise

    yield {"add": add, "fail": fail, "leave": leave, "die": die, "wait": wait}
    (folder / "closed").touch()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentLibrary:
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    module_file = tmp_path / "small_child.py"
    module_file.write_text(ENVIRONMENT)
    return EnvironmentLibrary(module_file=module_file, min_python="3.11", packages=["msgspec"], install="small msgspec")


async def exists(path: Path) -> None:
    await asyncio.to_thread(poll_until, path.exists)


async def test_calls_run_side_by_side_and_a_cancelled_one_is_cancelled_in_the_child(
    library: EnvironmentLibrary, tmp_path: Path
) -> None:
    async with EnvironmentChild(library, {"folder": str(tmp_path), "is_slow": True}) as child:
        waiting = asyncio.create_task(child.call("wait"))
        await exists(tmp_path / "waiting")
        assert await child.call("add", a=1, b=2) == 3
        with pytest.raises(EnvironmentFailed, match="LookupError: no such row"):
            await child.call("fail")
        for how, error in (("exit", "SystemExit"), ("cancel", "CancelledError")):
            with pytest.raises(EnvironmentFailed, match=f"{error}: no credit"):
                await child.call("leave", how=how)
        waiting.cancel()
        await exists(tmp_path / "cancelled")
        assert not waiting.done()
        (tmp_path / "may_close").touch()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert (tmp_path / "closed").exists()
    assert not psutil.pid_exists(int((tmp_path / "waiting").read_text()))


async def test_a_cancelled_call_that_does_not_end_in_the_child_is_left_after_a_time(
    library: EnvironmentLibrary, tmp_path: Path
) -> None:
    settings = {"folder": str(tmp_path), "is_slow": True}
    async with EnvironmentChild(replace(library, closing_s=0.1), settings) as child:
        waiting = asyncio.create_task(child.call("wait"))
        await exists(tmp_path / "waiting")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not (tmp_path / "closed").exists()


async def test_calls_in_a_child_that_dies_fail_and_the_next_starts_another(
    library: EnvironmentLibrary, tmp_path: Path
) -> None:
    async with EnvironmentChild(library, {"folder": str(tmp_path)}) as child:
        with pytest.raises(EnvironmentFailed, match="exit code 3"):
            await asyncio.gather(child.call("wait"), child.call("die"))
        dying = asyncio.create_task(child.call("die"))
        while not dying.done():  # others begin a call meanwhile, and are cancelled
            other = asyncio.create_task(child.call("add", a=1, b=2))
            await asyncio.sleep(0.001)
            other.cancel()
        assert isinstance(dying.exception(), EnvironmentFailed)
        assert await child.call("add", a=1, b=2) == 3


@pytest.mark.parametrize("steps", range(1, 6))
async def test_a_start_that_is_cancelled_leaves_no_socket_open(
    library: EnvironmentLibrary, tmp_path: Path, steps: int
) -> None:
    starting = asyncio.create_task(EnvironmentChild(library, {"folder": str(tmp_path)}).__aenter__())
    for _ in range(steps):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    # pytest fails a test that leaves a socket open


@pytest.mark.parametrize(
    ("changes", "settings", "problem"),
    [
        ({"min_python": "3.99"}, {}, r"is Python 3\.1\d, but Python 3\.99 or later is needed"),
        ({"packages": ["msgspec", "no_such_a", "no_such_b"]}, {}, "lacks no_such_a and no_such_b"),
        ({}, {"wrong": True}, "ValueError: wrong is wrong"),
        ({"module_file": Path("/no_such_child.py")}, {}, "could not run no_such_child.py|No such file"),
    ],
)
async def test_what_cannot_run_is_one_error_at_the_start(
    library: EnvironmentLibrary, changes: dict[str, Any], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        async with EnvironmentChild(replace(library, **changes), settings):
            pass


@pytest.mark.parametrize(("python", "problem"), [("", "names no Python"), ("/no/python", "is not a program")])
async def test_a_setting_that_names_no_python_says_how_to_make_one(
    library: EnvironmentLibrary, monkeypatch: pytest.MonkeyPatch, python: str, problem: str
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, python)
    with pytest.raises(InvalidInput, match=problem) as refused:
        async with EnvironmentChild(library, {}):
            pass
    assert "ENV/bin/pip install small msgspec" in str(refused.value.hint)
    assert refused.value.field == "environment_python"


PARENT = """
import asyncio, sys
from pathlib import Path
from forebay.generators.environments.child import EnvironmentChild, EnvironmentLibrary

async def main(module_file, folder):
    library = EnvironmentLibrary(module_file=Path(module_file), min_python="3.11", packages=["msgspec"], install="")
    async with EnvironmentChild(library, {"folder": folder}) as child:
        await child.call("wait")

asyncio.run(main(*sys.argv[1:]))
"""


def test_nothing_is_left_when_the_parent_is_killed(library: EnvironmentLibrary, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(library.module_file), str(tmp_path)]) as parent:
        poll_until((tmp_path / "waiting").exists)
        left = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(left) == 3
    poll_until(lambda: not any(process.is_running() for process in left))
