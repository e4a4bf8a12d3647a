"""How the server and the run processes write their log."""

import json
import logging
import re
import threading
from datetime import UTC, datetime
from typing import Literal

from forebay.telemetry.visible_text import visible

EVERY_S = 10.0
LogFormat = Literal["text", "json"]
_RUN_ID = re.compile(r"\brun-[0-9a-f]{12}\b")


class EntryFormatter(logging.Formatter):
    """Escapes control characters and indents further lines: no text can fake an entry or control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One JSON object per entry, in ASCII, for a collector of logs.

    It has ``time``, ``level``, ``logger`` and ``message``, ``run_id`` if the message names a run, and an exception's
    traceback as ``error``.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if run := _RUN_ID.search(message):
            entry["run_id"] = run.group()
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class RepeatedLines(logging.Filter):
    """Passes the first line of a kind, then counts for ``every_s`` seconds and logs how many more there were.

    For lines that clients can cause without limit. A kind is a logger, level and unformatted message, so arguments do
    not create new kinds. Attach it to loggers; safe for any thread.
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
            timer = threading.Timer(self._every_s, self._report, [kind, record])
            timer.daemon = True
            timer.start()
        return is_first

    def _report(self, kind: tuple[str, int, str], first: logging.LogRecord) -> None:
        with self._lock:
            num_held = self._num_held.pop(kind)
        if num_held:
            line = logging.makeLogRecord(first.__dict__ | {"msg": "%s (%d more in %g s)", "exc_info": None})
            line.args = (first.getMessage(), num_held, self._every_s)
            line.created += self._every_s
            # Bypass this filter, which would count the line.
            logging.getLogger(first.name).callHandlers(line)


def set_up_logging(level: str, log_format: LogFormat = "text") -> None:
    """Log to standard error, one line per event, with time and level."""
    handler = logging.StreamHandler()
    text = EntryFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Each of these logs every request: thousands a second at level info.
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "openai"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # This logger writes a line for every request that is not HTTP, from any client.
    uvicorns = logging.getLogger("uvicorn.error")
    if not any(isinstance(each, RepeatedLines) for each in uvicorns.filters):
        uvicorns.addFilter(RepeatedLines())
