"""Drop truncated samples from the batches of every task, and count discarded groups."""

import logging
from collections import Counter
from typing import Any

from forebay.hooks import hookimpl

logger = logging.getLogger(__name__)
reasons: Counter[str] = Counter()


@hookimpl
def filter_item(item: dict[str, Any]) -> bool | None:
    """False for a sample that ended at the token limit; None leaves the decision to other hooks."""
    return False if (item.get("extra_info") or {}).get("finish_reason") == "length" else None


@hookimpl
def group_closed(state: str, reason: str) -> None:
    """Count discarded groups by reason."""
    if state == "discarded":
        reasons[reason] += 1
        logger.warning("groups discarded so far: %s", dict(reasons))
