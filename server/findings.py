"""What is wrong, in sentences, in order of harm: for the page and for ``forebay status``."""

import time
from collections.abc import Collection, Iterator
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from forebay.core.addresses import engine_root
from forebay.core.group import BatchState
from forebay.telemetry.numbers import counted, seconds_text

if TYPE_CHECKING:  # commands that only call a server need no buffer
    from forebay.buffer.buffer import LiveRun
    from forebay.core.records.rows import BatchRow

DISCARD_REASONS = {
    "invalid": "all rewards are equal, so there is nothing to learn, unless is_valid_group is your own",
    "timed_out": "too few samples at its deadline",
    "filtered": "too few samples left after the filter",
    "incomplete": "too few rows after the last hook",
    "hook_failed": "a hook failed",
    "failed": "every rollout failed",
    "unreadable": "a stored sample could not be read back",
    "stale": "the weights that generated it were too old",
    "evaluated": "it belongs to an evaluation, whose result is stored",
}
"""Descriptions of the reasons for discarding groups."""
SHOW_FAILED_S = 86_400
"""Seconds since its start for which a failed run is still reported."""
QUIET_READS, QUIET_S = 3, 60.0
"""A trainer is late after this many of its usual intervals between reads, and at least this many seconds."""
USUAL_READS = 6


def run_findings(entry: "LiveRun", view: dict[str, Any], silent: Collection[str] = ()) -> list[str]:
    """What is wrong with one run; ``view`` is its ``run_summary``, ``silent`` are engines that do not answer."""
    now_s, name = time.time(), view["name"] or view["run_id"]
    if view["state"] == "failed":
        is_recent = now_s - view["started_at_s"] < SHOW_FAILED_S
        return [f"{name} failed: {str(view['reason']).partition(chr(10))[0]}"] if is_recent else []
    found = [] if view["has_ended"] else [*_standstill(entry, view, name, silent)]
    if not view["has_ended"] or has_usable_groups(view):
        problem = problem_of(view)
        found += [f"{name}: {problem}"] if problem else []
        found += _trainer(entry, view, name, now_s)
    return found


def _standstill(entry: "LiveRun", view: dict[str, Any], name: str, silent: Collection[str]) -> Iterator[str]:
    """Whether the run makes no progress, or will soon make none, and which engine that is due to."""
    missing = [url for url in view["engine_urls"] if engine_root(url) in silent]
    engines, num_open = " and ".join(missing or view["engine_urls"]), view["groups"]["open"]
    is_waiting = view["is_waiting_for_engine"] or bool(missing and num_open)
    if is_waiting:
        why = f"rollouts of {counted(num_open, 'open group')} wait for {engines or 'an engine'}, which does not answer"
    elif num_open:
        why = f"{counted(num_open, 'open group')} got no sample" + (f" from {engines}" if engines else "")
    else:
        why = f"no trainer reads {counted(view['groups']['ready'], 'ready group')}"
    if view["is_stalled"]:
        idle_s = entry.buffer.active.now_s() - entry.buffer.last_progress_s
        yield f"{name} has made no progress for {seconds_text(idle_s)}: {why}"
    elif is_waiting:
        yield f"{name}: {why}"


def _trainer(entry: "LiveRun", view: dict[str, Any], name: str, now_s: float) -> Iterator[str]:
    """Whether the trainer seems to be dead: its last lease expired, or it reads more seldom than usual."""
    batches = sorted(entry.buffer.batches.by_id.values(), key=lambda row: row.number)[-USUAL_READS:]
    if not batches or not view["groups"]["ready"] or entry.delivery.readers:
        return
    last, since_s = batches[-1], now_s - batches[-1].leased_at_s
    ready = f"{counted(view['groups']['ready'], 'group')} ready"
    if last.state is BatchState.EXPIRED:
        step = "" if last.step is None else f" (step {last.step})"
        ago = seconds_text(since_s - last.lease_s)
        yield f"the trainer of {name} let the lease of its last batch{step} expire {ago} ago; {ready}"
    elif last.state is not BatchState.LEASED and since_s > max(QUIET_READS * (usual_s := _usual_s(batches)), QUIET_S):
        usual = f", usually every {seconds_text(usual_s)}" if usual_s else ""
        yield f"no trainer has read from {name} for {seconds_text(since_s)}{usual}; {ready}"


def _usual_s(batches: "list[BatchRow]") -> float:
    times = [row.leased_at_s for row in batches]
    return median([after - before for before, after in pairwise(times)] or [0.0])


def problem_of(view: dict[str, Any]) -> str:
    """The most urgent problem: the alarm, or why the trainer has received nothing so far; "" if neither."""
    groups, samples, discarded = groups_of(view), samples_of(view), discarded_of(view)
    if alarm := alarm_of(view):
        return alarm
    if samples["failed"] and not samples["member"]:
        failures = {outcome: number for outcome, number in view["outcomes"].items() if number}
        shown = " · ".join(f"{outcome} {number}" for outcome, number in failures.items())
        return f"all {samples['failed']} rollouts so far failed: {shown}"
    if view.get("evaluates"):  # its groups are never read
        return ""
    if discarded and not has_usable_groups(view):
        (reason, _), *_ = discarded
        total = sum(number for _, number in discarded)
        return f"all {total} finished groups were discarded, most as {reason}: {DISCARD_REASONS.get(reason, '')}"
    waiting = groups["full"] + groups["ready"]
    if waiting and not (groups["leased"] or groups["delivered"]):
        return f"{counted(waiting, 'group')} ready, but no trainer has read a batch of this run yet"
    return ""


def alarm_of(view: dict[str, Any]) -> str:
    """Why the run yields few or no groups; "" without an alarm."""
    return str(view["alarm"]["message"]) if view["alarm"] else ""


def groups_of(view: dict[str, Any]) -> dict[str, int]:
    """Counts of a run's groups. Full open groups are counted as full: a read will judge them."""
    states, num_full = view["groups"], view["num_groups_full"]
    return {
        "open": states["open"] - num_full,
        "full": num_full,
        "ready": states["ready"],
        "leased": states["leased"],
        "delivered": states["acked"],
        "discarded": states["discarded"],
    }


def has_usable_groups(view: dict[str, Any]) -> bool:
    """Whether a trainer received a group of the run, or can."""
    groups = groups_of(view)
    return any(groups[state] for state in ("full", "ready", "leased", "delivered"))


def samples_of(view: dict[str, Any]) -> dict[str, int]:
    """Counts of a run's samples by outcome."""
    return {name: view["samples"].get(name, 0) for name in ("member", "failed", "late", "surplus", "duplicate")}


def discarded_of(view: dict[str, Any]) -> list[tuple[str, int]]:
    """Discarded groups by reason, most first."""
    return sorted(view["discarded"].items(), key=lambda item: -item[1])
