"""Lines that strangers can cause as often as they like: one is written, and the rest of some time is counted."""

import logging
import threading

EVERY_S = 10.0


class RepeatedLines(logging.Filter):
    """Lets the first line of a kind through, then counts for ``every_s`` seconds, and writes how many there were.

    A kind is what the logger was given before arguments are put in, so that they cannot make new ones. A filter of
    loggers, for use from any thread.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        super().__init__()
        self._every_s = every_s
        self._lock = threading.Lock()
        self._num_held: dict[tuple[str, int, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        kind = (record.name, record.levelno, str(record.msg))
        with self._lock:
            is_first = kind not in self._num_held
            self._num_held[kind] = 0 if is_first else self._num_held[kind] + 1
        if is_first:
            timer = threading.Timer(self._every_s, self._tell, [kind, record])
            timer.daemon = True
            timer.start()
        return is_first

    def _tell(self, kind: tuple[str, int, str], first: logging.LogRecord) -> None:
        with self._lock:
            num_held = self._num_held.pop(kind)
        if num_held:
            line = logging.makeLogRecord(first.__dict__ | {"msg": "%s (%d more in %g s)", "exc_info": None})
            line.args = (first.getMessage(), num_held, self._every_s)
            line.created += self._every_s
            # Past this filter: it counts what comes in, not what it says itself.
            logging.getLogger(first.name).callHandlers(line)
