"""Alarms about groups that end undelivered: several in a row, or too many in total. Pure.

**In a row**: ``alarm_after_groups`` of them raise the alarm, and the next group that does better ends it. ``deadlines``
checks at every tick and logs it.

**Lost**: finished, but discarded unintentionally. Intentional are: equal rewards, which teach nothing,
groups dropped by the user's own hooks, and ``max_staleness``. If more than ``alarm_lost_ratio`` of the finished groups
are lost for other reasons, the log reports each reason once, with its remedy.

``/readyz``, the metrics, ``forebay status`` and every view of the run show both, with the groups' reasons.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from forebay.core.group import DiscardReason, GroupState, RewardRange, range_text
from forebay.core.records.rows import GroupRow
from forebay.core.run import RunSettings

LEAST_FINISHED = 20
"""Minimum number of finished groups before the share counts: in fewer, one or two lost groups may be chance."""
LONGEST_DETAIL = 200
"""Maximum characters shown of the last group's detail."""

REMEDIES = {
    "timed_out": "too few of their samples arrived in time: `forebay status {run_id} --log 50` shows why; "
    "or raise group_timeout_seconds",
    "failed": "too many of their rollouts failed: `forebay status {run_id} --log 50` shows why",
    "incomplete": "rows were missing on a slime route, because samples failed or arrived too late: "
    "`forebay status {run_id} --log 50` shows why",
    "hook_failed": "a hook failed: fix it; GET /v1/runs/{run_id}/groups?state=discarded shows the traceback",
    "unreadable": "stored samples cannot be read back: check the disk",
}
"""Cause and remedy for each reason; for ``filtered`` groups the reward range is shown instead."""


class AlarmCounts:
    """Counts, by reason, the groups that were discarded in a row.

    Groups that never became ready are counted until one does. Groups that were discarded although they were ready are
    counted until one is delivered: a run whose groups all become stale delivers nothing either.
    """

    def __init__(self) -> None:
        self.num_in_a_row = 0
        """How many groups in a row ended undelivered."""
        self._never_ready: Counter[str] = Counter()
        self._once_ready: Counter[str] = Counter()

    def note(self, source: GroupState, target: GroupState, reason: str) -> None:
        """Count a group's change of state."""
        if target is GroupState.DISCARDED:
            (self._never_ready if source is GroupState.OPEN else self._once_ready)[reason] += 1
        elif target is GroupState.READY:
            self._never_ready.clear()
        elif target is GroupState.LEASED:
            self._once_ready.clear()
        # Kept as a number, because the timer compares it several times a second for every run.
        self.num_in_a_row = max(self._never_ready.total(), self._once_ready.total())

    def reasons(self, at_least: int) -> Mapping[str, int] | None:
        """The reasons, if at least ``at_least`` groups in a row ended undelivered."""
        if self.num_in_a_row < at_least:
            return None
        is_never = self._never_ready.total() == self.num_in_a_row
        return dict(self._never_ready if is_never else self._once_ready)


def alarm_text(reasons: Mapping[str, int]) -> str:
    """The alarm as text."""
    counts = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items(), key=lambda item: -item[1]))
    return f"{sum(reasons.values())} groups in a row ended undelivered: {counts}"


def cause_of(row: GroupRow, settings: RunSettings) -> str:
    """Why a discarded group was lost, named like a ``DiscardReason``; "" if it was discarded intentionally."""
    num_completed = row.num_samples - row.num_failed
    match row.reason:
        case DiscardReason.STALE | DiscardReason.EVALUATED:
            return ""
        case DiscardReason.INVALID:
            # A single remaining reward compares with nothing, so equal rewards are not the cause.
            return "failed" if row.num_failed and num_completed == 1 else ""
        case DiscardReason.FILTERED if row.lowest_reward is None:
            if num_completed >= settings.min_valid_item_size:
                return ""  # the user's own filter
            return "failed" if row.num_failed else "timed_out"
        case DiscardReason.INCOMPLETE if num_completed >= settings.group_size:
            return ""  # all were there until the user's own hook removed some
        case _:
            return row.reason


class Losses:
    """Counts the lost groups of a run, by cause."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.counts: Counter[str] = Counter()
        self._last_details: dict[str, str] = {}
        self._seen: RewardRange | None = None
        """Lowest and highest reward of the groups that were lost to the run's ``reward_range``."""
        self._allowed: RewardRange | None = None
        self._num_rewards = self.num_outside = 0
        """Rewards of ready groups, and those outside the range, whose samples the built-in filter drops."""

    def note_rewards(self, rewards: Sequence[float], outside: Sequence[float], allowed: RewardRange | None) -> None:
        """Count the rewards of a ready group; samples with the rewards ``outside`` were left out."""
        self._num_rewards += len(rewards)
        self.num_outside += len(outside)
        if outside:
            self._see(min(rewards), max(rewards), allowed)

    def note(self, row: GroupRow, settings: RunSettings) -> None:
        """Count a discarded group."""
        cause = cause_of(row, settings)
        if not cause:
            return
        self.counts[cause] += 1
        self._last_details[cause] = row.detail.partition("\n")[0][:LONGEST_DETAIL]
        if row.lowest_reward is not None and row.highest_reward is not None:
            self._see(row.lowest_reward, row.highest_reward, settings.reward_range)

    def _see(self, lowest: float, highest: float, allowed: RewardRange | None) -> None:
        low, high = self._seen or (lowest, highest)
        self._seen, self._allowed = (min(low, lowest), max(high, highest)), allowed

    def are_too_many(self, num_finished: int, settings: RunSettings) -> bool:
        """Whether more of the ``num_finished`` groups were lost than ``alarm_lost_ratio`` allows."""
        return num_finished >= LEAST_FINISHED and self.counts.total() > settings.alarm_lost_ratio * num_finished

    def text(self, num_finished: int) -> str:
        """All losses as text, the most frequent cause first."""
        reasons = "; ".join(self.reason_text(cause) for cause, _ in self.counts.most_common())
        return f"{self.counts.total()} of {num_finished} finished groups were lost: {reasons}"

    def reason_text(self, cause: str, *, with_detail: bool = True) -> str:
        """How many groups a cause took, what is wrong, and the remedy. A detail may quote a model's text."""
        if cause == DiscardReason.FILTERED and self._seen is not None:
            why = self._range_text()
        else:
            detail = self._last_details[cause] if with_detail else ""
            why = REMEDIES[cause].format(run_id=self._run_id) + (f" (the last one: {detail})" if detail else "")
        return f"{self.counts[cause]} {cause}: {why}"

    def samples_text(self, num_finished: int, settings: RunSettings) -> str:
        """Samples lost from ready groups because of ``reward_range``, as text; "" if they are not too many."""
        if num_finished < LEAST_FINISHED or self.num_outside <= settings.alarm_lost_ratio * self._num_rewards:
            return ""
        return f"{self.num_outside} of {self._num_rewards} samples of ready groups are left out: {self._range_text()}"

    def _range_text(self) -> str:
        seen, allowed = range_text(self._seen), range_text(self._allowed)
        remedy = "start the run with a range that includes them, or with null for any finite reward"
        return f"their rewards are within {seen}, reward_range is {allowed}: {remedy}"
