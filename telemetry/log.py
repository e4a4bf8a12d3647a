"""How the server and the run processes write their log."""

import logging


def set_up_logging(level: str) -> None:
    """One line per event on standard error, with time and level."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True)
    # Each logs a line for every request: thousands a second at level info.
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "openai"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
