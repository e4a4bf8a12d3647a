"""Steps of a run: where one begins, which groups the trainer has for it, and how the run process follows them."""

from dataclasses import asdict
from typing import Any

from forebay.buffer.buffer import LiveRun
from forebay.buffer.groups.groups import Groups
from forebay.buffer.run_buffer import RunBuffer
from forebay.buffer.run_warnings import UNANNOUNCED, warn
from forebay.core.backoff import Deadline
from forebay.core.group import GroupState
from forebay.core.run import StepStart
from forebay.core.weight_versions import Loaded
from forebay.server.views import closed_since


def announce(buffer: RunBuffer, loaded: Loaded) -> None:
    """Record the trainer's new weights, which begin a step. The caller saves the run.

    Announcing the same version again begins no step, also after a rewind: groups made for it are still there. The
    version may still mean other weights.
    """
    run, groups, weight_version = buffer.run, buffer.groups, loaded.version
    if run.weights.number == 0:
        _warn_of_foreign_names(buffer, weight_version)
    run.weights = run.weights.followed_by(loaded)
    if weight_version != run.step.weight_version:
        # Groups that are full now have samples of the old weights, and count for the step that ends.
        full = _full(groups) if run.counts_groups else []
        run.step = StepStart(run.step.number + 1, groups.num_closed, full, weight_version)
    run.weight_version = weight_version
    buffer.changes.weights_changed("announced", weight_version)
    run.warnings = [warning for warning in run.warnings if warning != UNANNOUNCED]


def _warn_of_foreign_names(buffer: RunBuffer, first: int) -> None:
    """Warn of samples from before the ``first`` announcement whose version looks newer than it."""
    groups = buffer.groups.in_state(GroupState.OPEN, GroupState.READY)
    newest = max((group.oldest_version or 0 for group in groups), default=0)
    if newest <= first:
        return
    warn(
        buffer.run,
        f"samples from before the first announcement, of version {first}, have version {newest} from their engines: "
        "max_staleness treats them as new. Announce the engines' version right after the start",
    )


def _full(groups: Groups) -> list[str]:
    """Open groups that have all their samples; the next read judges them."""
    return [group.group_id for group in groups.in_state(GroupState.OPEN) if groups.is_full(group)]


def step_view(buffer: RunBuffer) -> dict[str, Any]:
    """The step's number and weights and, if groups count, those it has and those discarded."""
    run, groups = buffer.run, buffer.groups
    weights = asdict(run.weights)
    step = {"number": run.step.number, "weight_version": run.step.weight_version, "weights": weights}
    if not run.counts_groups:
        return {**step, "counted": [], "discarded": []}
    # All are in memory: groups are not evicted during their step.
    numbers = range(run.step.num_closed + 1, groups.num_closed + 1)
    # A damaged journal may have lost one.
    closed = [groups.closed[number] for number in numbers if number in groups.closed]
    discarded = [group.group_id for group in closed if group.state is GroupState.DISCARDED]
    usable = [group.group_id for group in closed if group.state is not GroupState.DISCARDED]
    counted = set(usable + _full(groups)) - set(run.step.full)
    return {**step, "counted": sorted(counted), "discarded": discarded}


def news_number(buffer: RunBuffer) -> int:
    """A number that grows with each announcement, and when a group that could count is discarded."""
    discarded = sum(buffer.groups.discard_reasons.values()) if buffer.run.counts_groups else 0
    return buffer.run.weights.number + discarded


async def follow_steps(
    entry: LiveRun, after: int, seen: int, wait_s: float, *, is_paused: bool = False, is_still: bool | None = None
) -> dict[str, Any]:
    """The feed of closed groups, the step, and whether the run's engines or deadlines are paused.

    Waits up to ``wait_s`` for what is later than ``after`` or ``seen``, or for a change of ``is_paused`` or, unless it
    is None, ``is_still``.
    """
    deadline, buffer = Deadline(wait_s), entry.buffer

    def is_news() -> bool:
        is_later = buffer.groups.num_closed > after or news_number(buffer) != seen
        is_other = entry.run.is_paused != is_paused or is_still not in (None, not buffer.active.is_running)
        return is_later or is_other or not entry.run.is_alive

    # A signal only says that something changed: the state is read again each time.
    while not is_news() and await deadline.wait(buffer.news):
        pass
    return {
        **await closed_since(entry, after),
        "step": step_view(buffer),
        "seen": news_number(buffer),
        "paused": entry.run.is_paused,
        "still": not buffer.active.is_running,
    }
