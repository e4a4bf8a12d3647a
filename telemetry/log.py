"""How the server and the run processes write their log."""

import logging

from forebay.telemetry.repeated_lines import RepeatedLines
from forebay.telemetry.visible_text import visible_line


class EntryFormatter(logging.Formatter):
    """Entries that nothing in them can break: a name with a newline begins no line, one with an escape rules nobody."""

    def format(self, record: logging.LogRecord) -> str:
        return visible_line(super().format(record))


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
