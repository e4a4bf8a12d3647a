"""Room for bodies in memory: taken as their bytes arrive, waited for, given back."""

import asyncio

from forebay.core.errors import BodyTooLarge, BufferFull


class BodyRoom:
    """So many bytes of bodies are in memory at once.

    A body that finds no room waits while others can finish. Where bodies that have not come whole hold so much that
    the oldest of them cannot go on, whatever else is given back, the newest of them gets a 429: else they would wait
    for each other.
    """

    def __init__(self, num_bytes: int, wait_s: float) -> None:
        self.num_bytes = num_bytes
        self.free_bytes = num_bytes
        self._wait_s = wait_s
        # In the order in which they came. A body that came whole at once, and found room, is never in it.
        self._growing: dict[BodyShare, None] = {}

    def take(self, share: "BodyShare", num_bytes: int) -> bool:
        """Whether there was room; then it is the body's."""
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        share.num_bytes += num_bytes
        return True

    def begin(self, share: "BodyShare") -> None:
        """The body will want more."""
        self._growing[share] = None

    def finish(self, share: "BodyShare") -> None:
        """The body is whole; the room is given back when it is done with."""
        if share in self._growing:
            del self._growing[share]
            self._share_out()

    async def wait(self, share: "BodyShare", num_bytes: int) -> None:
        """Wait until there is room, and take it. Raises ``BufferFull``, ``BodyTooLarge``."""
        self.begin(share)
        share.wanted_bytes = num_bytes
        waiter = share.waiter = asyncio.get_running_loop().create_future()
        try:
            self._share_out()
            async with asyncio.timeout(self._wait_s):
                await waiter
        except TimeoutError:
            raise _full(f"request bodies have held {self.num_bytes - self.free_bytes} bytes") from None
        finally:
            share.waiter = None

    def give_back(self, share: "BodyShare") -> None:
        """Whatever the body had; it may be called twice."""
        self.free_bytes += share.num_bytes
        share.num_bytes = 0
        self._growing.pop(share, None)
        if self._growing:
            self._share_out()

    def _share_out(self) -> None:
        """Give room to those that wait, oldest first; where that lets none of them go on, refuse the newest."""
        self._grant()
        while (blocked := self._newest_of_a_deadlock()) is not None:
            assert blocked.waiter is not None
            is_alone = blocked.num_bytes + blocked.wanted_bytes > self.num_bytes
            why = "request bodies that have not come whole hold all room for them, and this one came last"
            blocked.waiter.set_exception(BodyTooLarge(self.num_bytes, "max_bodies_bytes") if is_alone else _full(why))
            self.free_bytes += blocked.num_bytes
            blocked.num_bytes = 0
            del self._growing[blocked]
            self._grant()

    def _grant(self) -> None:
        for share in self._growing:
            if not share.is_waiting:
                continue
            if not self.take(share, share.wanted_bytes):  # nobody who came later goes first
                return
            assert share.waiter is not None
            share.waiter.set_result(None)

    def _newest_of_a_deadlock(self) -> "BodyShare | None":
        if not self._growing or not all(share.is_waiting for share in self._growing):
            return None
        oldest = next(iter(self._growing))
        if sum(share.num_bytes for share in self._growing) + oldest.wanted_bytes <= self.num_bytes:
            return None  # bodies that came whole make room
        return next((share for share in reversed(self._growing) if share.num_bytes), None)


class BodyShare:
    """What one body has of the room."""

    __slots__ = ("num_bytes", "waiter", "wanted_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.wanted_bytes = 0
        self.waiter: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for room, and has not been given any."""
        return self.waiter is not None and not self.waiter.done()


def _full(what: str) -> BufferFull:
    return BufferFull(what, hint="try again after Retry-After, send less at once, or raise max_bodies_bytes")
