"""Waiting for the trainer: once a step has its groups, nothing more is generated until other weights are announced."""

import logging
from collections.abc import Callable

from forebay.core.waiting import Signal
from forebay.generators.buffer_link.abc import Step

logger = logging.getLogger(__name__)

WAIT_S = 3_600.0


class Hold:
    """Counts the complete groups of a step. With ``groups_per_step`` None the run is never held.

    ``on_change`` is called, in the event loop, with True when the run begins to be held and with False when it goes on.
    """

    def __init__(self, groups_per_step: int | None = None) -> None:
        self.on_change: Callable[[bool], None] = lambda _: None
        self.is_held = False
        self._is_paused = False
        self._groups_per_step = groups_per_step
        self._number = 0
        self._counted: set[str] = set()
        self._news = Signal()

    def note_complete(self, group_id: str) -> None:
        """The last slot of a group is filled. It may be told before the server knows."""
        if self._groups_per_step is not None:  # else nothing ever forgets them
            self._counted.add(group_id)
            self._update()

    def note_step(self, step: Step) -> None:
        """Take what the server says: another step begins with its groups only, and a discarded one makes room."""
        if step.number != self._number:
            self._number = step.number
            self._counted.clear()
        self._counted |= set(step.counted)
        self._counted -= set(step.discarded)
        self._update()

    async def wait(self) -> None:
        """Return when the run is not held; at once if it is not."""
        while self.is_held:
            await self._news.wait(WAIT_S)

    @property
    def may_call(self) -> bool:
        """Whether engine calls may go out: the run is not held, and its engines do not stand still."""
        return not (self.is_held or self._is_paused)

    def note_paused(self, is_paused: bool) -> None:
        """The engines stand still, or go on. What has ended meanwhile is sent all the same."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            self._news.notify()

    async def wait_call(self) -> None:
        """Return when engine calls may go out."""
        while not self.may_call:
            await self._news.wait(WAIT_S)

    def _update(self) -> None:
        is_held = self._groups_per_step is not None and len(self._counted) >= self._groups_per_step
        if is_held == self.is_held:
            return
        self.is_held = is_held
        if is_held:
            logger.info("held: the step has its %d groups; the next weight version lets it go on", len(self._counted))
        else:
            logger.info("no longer held")
        self.on_change(is_held)
        self._news.notify()
