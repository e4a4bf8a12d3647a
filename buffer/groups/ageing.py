"""How old an open group is: while its run process says that none of its rollouts is in flight, it does not age.

Neither of its two deadlines comes nearer meanwhile. All times are in the run's active seconds, and what is counted
stands in the group's row, so that it holds over restarts.
"""

from forebay.core.records.rows import GroupRow


def begin_idle(row: GroupRow, at_s: float) -> None:
    """None of its rollouts is in flight from now on."""
    if row.idle_since_s is None:
        row.idle_since_s = at_s


def end_idle(row: GroupRow, at_s: float) -> None:
    """It ages again."""
    if row.idle_since_s is not None:
        row.idle_s, row.timeout_from_s = idle_seconds(row, at_s), timeout_from(row, at_s) or 0.0
        row.idle_since_s = None


def idle_seconds(row: GroupRow, until_s: float) -> float:
    """For how long it has not aged since it opened; ``until_s`` is when it ages again, if it does not now."""
    return row.idle_s + _since(row.idle_since_s, until_s)


def age_s(row: GroupRow, now_s: float, until_s: float) -> float:
    """How old it is now, as its deadline counts it."""
    return now_s - row.opened_s - idle_seconds(row, min(now_s, until_s))


def timeout_from(row: GroupRow, until_s: float) -> float | None:
    """When its last sample came, put off by the time since then in which it did not age; None without a sample."""
    if row.last_sample_s is None:
        return None
    counted_from_s = max(row.last_sample_s, row.timeout_from_s)
    since_s = row.idle_since_s
    return counted_from_s + _since(None if since_s is None else max(since_s, counted_from_s), until_s)


def _since(begun_s: float | None, until_s: float) -> float:
    return 0.0 if begun_s is None else max(0.0, until_s - begun_s)
