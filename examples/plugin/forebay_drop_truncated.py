"""Leave truncated samples out of every batch, whatever the task, and count the groups that come to nothing."""

import logging
from collections import Counter
from typing import Any

from forebay.hooks import hookimpl

logger = logging.getLogger(__name__)
reasons: Counter[str] = Counter()


@hookimpl
def filter_item(item: dict[str, Any]) -> bool | None:
    """False for a sample that ended at the token limit; None leaves the others to whoever is asked next."""
    return False if (item.get("extra_info") or {}).get("finish_reason") == "length" else None


@hookimpl
def group_closed(state: str, reason: str) -> None:
    """Keep count of why groups are discarded."""
    if state == "discarded":
        reasons[reason] += 1
        logger.warning("groups discarded so far: %s", dict(reasons))
