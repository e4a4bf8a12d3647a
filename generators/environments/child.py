"""The parent's side of an environment's child: starts it, calls its methods, and replaces it if it dies."""

import asyncio
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from forebay.core.errors import InvalidInput
from forebay.core.processes.child_link import ChildEnded, ChildLink, MessageTooLong
from forebay.generators.failures import AgentFailed, EnvironmentFailed, JudgeFailed, RolloutFailed

PYTHON_VARIABLE = "FOREBAY_ENVIRONMENT_PYTHON"
"""Environment variable of a run process with the server's setting ``environment_python``."""
FOLDER = Path(__file__).parent
FAILURES: dict[str, type[RolloutFailed]] = {
    "agent": AgentFailed,
    "environment": EnvironmentFailed,
    "judge": JudgeFailed,
}


@dataclass(frozen=True, kw_only=True)
class EnvironmentLibrary:
    """What a child runs, and what its Python must have."""

    module_file: str | Path
    """A file for ``child_main.py``, which documents it, relative to this folder."""
    min_python: str
    packages: Sequence[str]
    """Names by which packages are imported, ``msgspec`` among them."""
    install: str
    """Arguments of ``pip install`` for these packages."""
    closing_s: float = 60.0
    """Seconds to remove containers and sandboxes, after a call is cancelled or the run has ended."""


class _Reply(msgspec.Struct):
    id: int
    result: Any = None
    error: str = ""
    missing: str = ""
    """What the Python lacks, which has ended the child."""


class EnvironmentChild:
    """A long-lived child with the Python of the setting ``environment_python``. Enter it with ``async with``.

    Entering starts the child and raises ``InvalidInput`` if it cannot run. It is given ``settings``, JSON values. If it
    dies, calls in progress fail, and the next call starts another child.
    """

    def __init__(self, library: EnvironmentLibrary, settings: Mapping[str, Any]) -> None:
        self._library, self._settings = library, dict(settings)
        self._python = os.environ.get(PYTHON_VARIABLE, "")
        self._link: ChildLink[_Reply] | None = None
        self._starting = asyncio.Lock()
        self._receiving: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> Self:
        if not (found := shutil.which(self._python)):
            named = f"environment_python ({self._python}) is not a program"
            raise self._unusable(named if self._python else "the setting environment_python names no Python")
        self._python = found
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._link is not None:
            self._link.hang_up()
            await self._link.end(2 * self._library.closing_s)
        if self._receiving is not None:
            await self._receiving

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the child with JSON values.

        Cancelling the call cancels it in the child, and waits at most ``closing_s`` until it has ended there.
        Raises ``EnvironmentFailed`` if the method raises, or the child dies.
        """
        link = await self._started()
        number = next(self._ids)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await link.send({"id": number, "method": method, "params": params})
            await asyncio.wait([answer])  # which a cancellation leaves open
            return answer.result()
        except asyncio.CancelledError:
            await link.send({"id": number})
            with suppress(EnvironmentFailed, TimeoutError):
                await asyncio.wait_for(answer, self._library.closing_s)
            raise
        finally:
            del self._calls[number]

    async def run(self, **params: Any) -> dict[str, Any]:
        """Call the method ``run``: a rollout. Raises the kind of failure that its result names."""
        result: dict[str, Any] = await self.call("run", **params)
        if "error" in result:
            raise FAILURES[result["kind"]](result["error"])
        return result

    async def _started(self) -> ChildLink[_Reply]:
        async with self._starting:
            if self._link is None or not self._link.is_alive:
                if self._receiving is not None:
                    # It fails the calls of the child that died, not those of the next one.
                    await asyncio.wait([self._receiving])
                self._link = await self._start()
                self._receiving = asyncio.create_task(self._receive(self._link))
            return self._link

    async def _start(self) -> ChildLink[_Reply]:
        library, python = self._library, self._python
        link = await ChildLink[_Reply].start(
            "forebay.generators.environments.child_tree",
            *(str(library.closing_s), python, *(str(FOLDER / file) for file in ("child_main.py", library.module_file))),
            *(library.min_python, ",".join(library.packages)),
            setup=self._settings,
            reads=_Reply,
            # Programs of the environment, such as uv, are found before the server's.
            env={"PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}"},
            stdout=None,
        )
        try:
            reply = await link.receive()
        except ChildEnded as ended:
            raise self._unusable(f"{python} could not run {library.module_file} ({ended})") from None
        except BaseException:  # of any kind, also a cancelled start: the child must not outlive it
            await link.kill()
            raise
        if not reply.missing and not reply.error:
            return link
        await link.end(library.closing_s)
        if reply.missing:
            raise self._unusable(f"environment_python ({python}) {reply.missing}")
        raise InvalidInput(reply.error, hint="the run's log has the whole error")

    async def _receive(self, link: ChildLink[_Reply]) -> None:
        try:
            while True:
                reply = await link.receive()
                if (answer := self._calls.get(reply.id)) is None or answer.done():
                    continue  # it was cancelled, and took too long
                if reply.error:
                    answer.set_exception(EnvironmentFailed(reply.error))
                else:
                    answer.set_result(reply.result)
        except (ChildEnded, MessageTooLong) as ended:
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(EnvironmentFailed(f"the environment's process ended ({ended})"))

    def _unusable(self, problem: str) -> InvalidInput:
        needed = self._library.min_python
        command = f"python{needed} -m venv ENV && ENV/bin/pip install {self._library.install}"
        return InvalidInput(
            problem,
            hint=f"run `{command}`, then start the server with FOREBAY_ENVIRONMENT_PYTHON=ENV/bin/python",
            field="environment_python",
        )
