"""What is remembered of a hook host that could not be set up: it would fail for every group, and slowly."""

import copy
from collections.abc import Callable

from forebay.core.errors import HookFailed

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0


class StartFailures:
    """Holds the last failure for a time that doubles with each further one, from 1 s to a minute.

    What was missing may be there by the next try, so that it is tried again at all.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._error: HookFailed | None = None
        self._wait_s = 0.0
        self._until_s = 0.0

    def check(self) -> None:
        """Raise the last failure while it is too early for another try."""
        if self._error is not None and self._now_s() < self._until_s:
            raise copy.copy(self._error)

    def note(self, error: HookFailed) -> None:
        """A start failed."""
        self._error = error
        self._wait_s = min(MAX_WAIT_S, self._wait_s * 2) or FIRST_WAIT_S
        self._until_s = self._now_s() + self._wait_s

    def clear(self) -> None:
        """A start succeeded."""
        self._error, self._wait_s = None, 0.0
