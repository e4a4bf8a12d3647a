"""How the server and the run processes write their log."""

import logging
import threading

from forebay.telemetry.visible_text import visible_line

EVERY_S = 10.0


class EntryFormatter(logging.Formatter):
    """Entries that nothing in them can break: a name with a newline begins no line, one with an escape rules nobody."""

    def format(self, record: logging.LogRecord) -> str:
        return visible_line(super().format(record))


class RepeatedLines(logging.Filter):
    """Lets the first line of a kind through, then counts for ``every_s`` seconds, and writes how many there were.

    For lines that clients can cause as often as they like. A kind is what the logger was given before arguments are
    put in, so that they cannot make new ones. A filter of loggers, for use from any thread.
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


def set_up_logging(level: str) -> None:
    """One line per event on standard error, with time and level."""
    handler = logging.StreamHandler()
    handler.setFormatter(EntryFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Each logs a line for every request: thousands a second at level info.
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "openai"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # A line for every request that is not HTTP, whoever sends it.
    uvicorns = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, RepeatedLines) for each in uvicorns.filters):
        uvicorns.addFilter(RepeatedLines())
