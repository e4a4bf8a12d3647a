"""What rollouts cost: their tokens, by what became of them; and how those of the used ones were put together."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from forebay.generators.groups import Execution

Ending = Literal["finished", "failed", "aborted"]
"""Its sample is used; it failed; or nobody needed it any more."""


def cost(attempts: Sequence[Execution], ending: Ending) -> Counter[str]:
    """What one rollout adds to the counts. Attempts before the last one failed; one that never began costs nothing."""
    if not attempts:
        return Counter()
    *before, last = attempts
    counts = Counter({f"rollouts_{ending}": 1, f"tokens_{ending}": last.num_sampled_tokens})
    counts["tokens_failed"] += sum(attempt.num_sampled_tokens for attempt in before)
    if ending == "finished":
        counts.update({f"capture_{name}": number for name, number in last.trajectory.counters.items()})
    return counts


def held(rollouts: Iterable[Sequence[Execution]]) -> Counter[str]:
    """What is kept of rollouts in flight until the next step; those that sampled nothing yet do not count."""
    tokens = [attempts[-1].num_sampled_tokens for attempts in rollouts if attempts]
    return Counter(rollouts_held=sum(1 for number in tokens if number), tokens_held=sum(tokens))
