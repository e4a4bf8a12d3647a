"""The actor of a worker on Ray: the part that runs on the node.

Ray does not ship namespace packages, so the node's own Forebay is imported there. ``actor_class`` is sent by value and
imports nothing of Forebay until the versions have been compared.
"""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from forebay.core.errors import InvalidInput
from forebay.workers.backends.wire import Frames, from_frames, outcome_frames, read_call, read_classes, to_frames
from forebay.workers.members.host import WorkerHost
from forebay.workers.members.worker_spec import WorkerSpec, failed_future

Outcome = tuple[str, Frames]


def version_reader() -> Callable[[], dict[str, str]]:
    """A function that reads the versions that must match on every node. It imports nothing of Forebay."""

    def read() -> dict[str, str]:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        found = {"Python": platform.python_version()}
        for shown, name in (("Ray", "ray"), ("Forebay", "forebay")):
            try:
                found[shown] = version(name)
            except PackageNotFoundError:
                found[shown] = "none"
        return found

    return read


def actor_class() -> type:
    """The class of the actor, sent by value, so that a node with another version of Forebay can report it."""
    read_versions = version_reader()

    class ForebayWorker:
        def __init__(self) -> None:
            import asyncio

            self.member: Any = None
            self.is_made = asyncio.Event()

        async def master(self) -> tuple[str, int]:
            import socket

            import ray

            with socket.socket() as bound:  # no import of Forebay: `begin` has not compared the versions yet
                bound.bind(("", 0))
                return ray.util.get_node_ip_address(), bound.getsockname()[1]

        async def begin(self, wanted: dict[str, str], frames: Any, master: Any) -> Any:
            import ray

            node, found = ray.util.get_node_ip_address(), read_versions()
            if found != wanted:
                return node, found, None, None
            from forebay.workers.backends.ray_member import RayMember

            self.member = RayMember(node)
            outcome = await self.member.begin(frames, master)
            if outcome[0] != "value":
                return node, found, outcome, None
            self.is_made.set()
            return node, found, outcome, await self.member.vitals()

        async def run(self, method: str, *args: Any) -> Any:
            await self.is_made.wait()
            return await getattr(self.member, method)(*args)

    return ForebayWorker


class RayMember:
    """One worker on its node. Its methods run in Ray's event loop, users' code in two threads of the host."""

    _host: WorkerHost
    """Set by ``begin``."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._turns: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, Future[Any]] = {}
        self._next = 1
        self._waiting: dict[int, asyncio.Event] = {}
        self._dropped: set[int] = set()
        threading.Thread(target=self._take_turns, name="worker turns", daemon=True).start()

    async def begin(self, frames: Frames, master: tuple[str, int] | None) -> Outcome:
        """Construct the classes of a spec, with ``master`` as the rendezvous of its group. Returns the outcome."""
        made: Future[Any] = Future()
        self._turns.put(lambda: self._make(frames, master, made))
        await _ended(made)
        return outcome_frames(made, "the constructor")

    async def call(self, number: int, method: str, frames: Frames) -> Outcome:
        """Run a call and return its outcome. Calls begin in the order of their numbers, in any order of arrival."""
        await self._turn_of(number)
        future = self._running[number] = self._begin_call(number, method, frames)
        self._let_next(number)
        await _ended(future)
        del self._running[number]
        return outcome_frames(future, method, out_of_band=False)

    async def cancel(self, number: int) -> None:
        """Cancel a call that has begun or has not arrived yet. Does nothing for a call that has ended."""
        future = self._running.get(number)
        if future is not None:
            future.cancel()
        elif number >= self._next:
            self._dropped.add(number)

    async def skip(self, number: int) -> None:
        """Skip a call that will not arrive, so that later ones can begin."""
        await self._turn_of(number)
        self._let_next(number)

    async def vitals(self) -> Frames:
        """Current vitals."""
        return to_frames(self._host.vitals)

    async def close(self) -> None:
        """Cancel running calls, and end the event loop."""
        await asyncio.to_thread(self._host.close, 0.0)

    def _begin_call(self, number: int, method: str, frames: Frames) -> "Future[Any]":
        if number in self._dropped:
            self._dropped.remove(number)
            dropped: Future[Any] = Future()
            dropped.cancel()
            return dropped
        try:
            return self._host.call(read_call(frames, method))
        except InvalidInput as error:
            return failed_future(error)

    def _make(self, frames: Sequence[Any], master: tuple[str, int] | None, made: "Future[Any]") -> None:
        try:
            (spec,) = from_frames(frames[:1])
            spec = replace(cast("WorkerSpec", spec), classes=read_classes(frames[1:]), master=master)
            os.environ.update(spec.variables)
            self._host = WorkerHost(spec, self._node, self._turns.put)
            self._host.make()
            made.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the controller gets a constructor's SystemExit, too
            made.set_exception(error)

    def _take_turns(self) -> None:
        while True:
            with suppress(KeyboardInterrupt):  # raised by a method: its call has failed with it
                self._turns.get()()

    async def _turn_of(self, number: int) -> None:
        # Large arguments travel through Ray's object store, and small calls overtake them.
        if number != self._next:
            self._waiting[number] = asyncio.Event()
            await self._waiting[number].wait()

    def _let_next(self, number: int) -> None:
        self._next = number + 1
        waiting = self._waiting.pop(number + 1, None)
        if waiting is not None:
            waiting.set()


async def _ended(future: "Future[Any]") -> None:
    """Wait until a future of another thread is done, whatever its outcome."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(event.set))
    await event.wait()
