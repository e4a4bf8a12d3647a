"""Numbers about a batch and its run, for the trainer's own log."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any, ParamSpec

from forebay.client.calls.flow import Flow
from forebay.client.model import Batch, Row, RunStats
from forebay.core.weight_versions import oldest_version

P = ParamSpec("P")

GROUP_STATES = ("ready", "open")


def timed(read: Callable[P, Flow[Batch | None]]) -> Callable[P, Flow[Batch | None]]:
    """Record in a batch how long reading it took."""

    @wraps(read)
    def timed_read(*args: P.args, **options: P.kwargs) -> Flow[Batch | None]:
        began_s = time.monotonic()
        batch = yield from read(*args, **options)
        return batch and replace(batch, wait_s=time.monotonic() - began_s)

    return timed_read


def batch_metrics(parts: Sequence[tuple[Batch, RunStats]]) -> dict[str, float]:
    """The metrics of one batch, given as its part of each run with the statistics of that run.

    ``docs/trainers.md`` lists the names. A name without a value is left out.
    """
    # Imported here and below: a client that never asks for metrics would load them too.
    from forebay.core.group import DiscardReason
    from forebay.core.outcome import RolloutOutcome

    rows = [(row, stats) for batch, stats in parts for row in _main_rows(batch)]
    rewards = [float(row["raw_reward"]) for row, _ in rows if isinstance(row.get("raw_reward"), int | float)]
    staleness = [age for row, stats in rows if (age := _staleness(row, stats)) is not None]
    lengths = [length for batch, _ in parts for length in _lengths(batch)]
    values = {
        **_spread("reward", rewards, ("mean", "std", "min", "max")),
        **_reward_parts([row for row, _ in rows]),
        **_arrived([batch.meta_info for batch, _ in parts]),
        **_spread("staleness", staleness, ("mean", "max")),
        **_spread("length", lengths, ("mean", "max")),
        **_counts("groups", GROUP_STATES, [stats.groups for _, stats in parts]),
        **_counts("dropped", tuple(DiscardReason), [stats.discarded for _, stats in parts]),
        **_counts("outcome", tuple(RolloutOutcome), [stats.outcomes for _, stats in parts]),
        "wait_s": sum(batch.wait_s for batch, _ in parts),
    }
    # Rewards near the largest float overflow.
    return {f"forebay/{name}": float(value) for name, value in values.items() if math.isfinite(value)}


def _main_rows(batch: Batch) -> list[Row]:
    """The rows that are neither forks nor copies which a hook added to fill a group."""
    from forebay.core.sample import fork_number

    places = [at for at, row in enumerate(batch.rows) if at in batch.foreign_rows or not fork_number(row.get("fork"))]
    return list({str(batch.rows[at].get("uid")): batch.rows[at] for at in places}.values())


def _staleness(row: Row, stats: RunStats) -> int | None:
    oldest = oldest_version(row.get("weight_version"), row.get("weight_versions"))
    return None if oldest is None or stats.weight_version is None else max(0, stats.weight_version - oldest)


def _lengths(batch: Batch) -> list[int]:
    """The number of trained tokens of each row that has tokens."""
    from forebay.client.tensors.ragged import Ragged

    ragged = Ragged.of(batch)
    mask = ragged.numbers("loss_mask", "B")
    return [sum(mask[start:end]) for start, end in pairwise(ragged.numbers("offsets", "q")) if start < end]


def _spread(name: str, values: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    functions: dict[str, Callable[[Sequence[float]], float]] = {"mean": _mean, "std": _std, "min": min, "max": max}
    return {f"{name}/{kind}": functions[kind](values) for kind in kinds} if values else {}


def _reward_parts(rows: Sequence[Row]) -> dict[str, float]:
    """The mean of each named part of the rewards, over the rows that have it."""
    from forebay.core.outcome import reward_parts_of

    parts = defaultdict[str, list[float]](list)
    for row in rows:
        for name, part in reward_parts_of(row).items():
            parts[name].append(part)
    return {f"reward/{name}/mean": _mean(values) for name, values in parts.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) * (value - mean) for value in values]))


def _arrived(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean reward of all samples that arrived since the last batch; a user's hook may leave it out."""
    known = [(info.get("avg_reward"), info.get("total_samples")) for info in infos]
    given = [(mean, num) for mean, num in known if isinstance(mean, int | float) and isinstance(num, int) and num > 0]
    total = sum(num for _, num in given)
    return {"reward/all_mean": sum(mean * num for mean, num in given) / total} if given else {}


def _counts(name: str, keys: Sequence[str], counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Sums over runs; a known key that has not occurred is 0, so that a chart begins with the training."""
    return {f"{name}/{key}": sum(each.get(key, 0) for each in counts) for key in keys}
