"""An event loop in a thread of its own, and whether it stands still."""

import asyncio
import os
import sys
import threading
import time

_LIBRARIES = os.path.dirname(os.__file__)
"""The standard library's folder, below which installed packages are too."""


class LoopPulse:
    """Tells for how long a loop has stood still, and in which line. Asks the loop only when it is asked itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        self._loop, self._thread_id = loop, thread_id
        self._lock = threading.Lock()
        self._asked_s: float | None = None

    def blocked(self) -> tuple[float, str]:
        """Seconds, and ``file:line in function``; ``(0.0, "")`` while it turns. From any thread but the loop's.

        Ask every second or so: a standstill is counted from the first question that the loop left unanswered.
        """
        with self._lock:
            if self._asked_s is None:
                self._asked_s = time.monotonic()
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # closed meanwhile
                    self._asked_s = None
                return 0.0, ""
            return time.monotonic() - self._asked_s, line_of(self._thread_id)

    def _answer(self) -> None:
        self._asked_s = None


class LoopThread:
    """Runs an event loop in a daemon thread until it is stopped."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self.pulse = LoopPulse(self.loop, self._thread.ident)

    def stop(self, wait_s: float = 1.0) -> None:
        """Cancel what still runs in the loop, and end the thread; waits so long for both."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(wait_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        running = asyncio.all_tasks(self.loop)
        for task in running:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def line_of(thread_id: int) -> str:
    """Where a thread is: ``file:line in function``, of the innermost code that is no library; empty if it has ended."""
    innermost = frame = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}" if frame else ""
