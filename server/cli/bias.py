"""Compares the groups that a trainer received with what it did not receive, to find the rules that bend the data.

The input is what the server's API shows: groups with their samples, and summaries of rollouts. Groups count once. Late
and surplus samples, and aborted rollouts, are compared sample by sample, with one of each group, because a mean of a
group varies less than one sample.
"""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple
from zlib import crc32

from forebay.telemetry.analysis.robust import ks_distance
from forebay.telemetry.numbers import counted, number_text

Json = dict[str, Any]
Features = Mapping[str, float]
"""What is known of a group or a rollout; unknown features are left out."""

LEAST_NUM = 30
"""With fewer groups on either side, nothing is concluded."""
LEVEL = 0.01
"""Chance of any false finding in a report."""
LEAST_S = 0.1
"""Shorter durations count as this one."""
_TERMS = 100


class Feature(NamedTuple):
    """How two populations are compared by one feature, and how a difference is worded."""

    unit: str
    least: float
    """The smallest difference that counts: of the means, or of the logarithms of the medians."""
    more: str
    less: str
    is_log: bool = False


FEATURES = {
    "tokens": Feature("tokens", 0.2, "long rollouts", "short rollouts", is_log=True),
    "bytes": Feature("bytes", 0.2, "long rollouts", "short rollouts", is_log=True),
    "seconds": Feature("s", 0.2, "slow rollouts", "fast rollouts", is_log=True),
    "reward": Feature("", 0.1, "rollouts of high reward", "rollouts of low reward"),
    "spread": Feature("", 0.1, "groups whose rewards differ more", "groups whose rewards differ less"),
    "failed": Feature("", 0.1, "groups with more failures", "groups with fewer failures"),
    "staleness": Feature("versions", 0.5, "rollouts of older weights", "rollouts of newer weights"),
}
"""``bytes`` stands in for ``tokens`` in runs whose samples have no tokens."""

IN_FLIGHT = "in_flight"
RULES = {
    "timed_out": "The deadline discards",
    "invalid": "is_valid_group discards",
    "filtered": "filter_item discards",
    "incomplete": "The last hook discards",
    "hook_failed": "A failing hook discards",
    "failed": "Failure of all samples discards",
    "unreadable": "Damage on the disk discards",
    "stale": "max_staleness discards",
    "late": "Closing groups early discards",
    "surplus": "Over-sampling discards",
    "aborted": "Aborting what is not needed discards",
    IN_FLIGHT: "A resume that drops what is in flight at a checkpoint would discard",
}
"""Kinds of what was not delivered. Groups in flight at a checkpoint were, but other buffers lose them."""
_BY_DEFINITION = {("invalid", "spread"), ("failed", "failed"), ("stale", "staleness")}


class Bias:
    """Collects a run's groups with ``add_group``, its rollouts with ``add_rollout``, and compares them."""

    def __init__(self, group_size: int, checkpoints: Sequence[float], stopped_s: float = math.inf) -> None:
        """``checkpoints`` are times in seconds since the Unix epoch; ``stopped_s`` is in the run's active seconds."""
        self._group_size, self._checkpoints, self._stopped_s = group_size, sorted(checkpoints), stopped_s
        self._delivered, self._members = list[Features](), list[Features]()
        self._pairs = defaultdict[str, tuple[list[Features], list[Features]]](lambda: ([], self._delivered))
        """What was lost, and what it is compared with, by kind."""
        self._pairs |= {"late": ([], self._members), "surplus": ([], self._members), IN_FLIGHT: ([], [])}
        self._decided: dict[str, tuple[int, str, float | None, bool]] = {}
        """Epoch, instance and seconds of each group, and whether it was delivered."""
        self._rollouts: dict[tuple[str, str], Json] = {}
        """One rollout of each ending and group."""

    def add_group(self, group: Json) -> None:
        """Add a group with its ``samples``. Groups that may still be delivered, or that a stop cut off, are ignored."""
        samples = [each for each in group["samples"] if not each["fork"]]
        is_delivered, is_short = group["state"] in ("leased", "acked"), group["reason"] == "timed_out"
        is_cut_off = (is_short or group["is_salvaged"]) and group["closed_s"] >= self._stopped_s
        if is_cut_off or group["state"] in ("open", "ready"):
            return
        features = self._add_delivered(group, samples) if is_delivered else self._add_lost(group, samples, is_short)
        key = json.dumps(group["instance_id"])
        self._decided[group["group_id"]] = (group["epoch"], key, features.get("seconds"), is_delivered)

    def _add_delivered(self, group: Json, samples: Sequence[Json]) -> Features:
        by_outcome = defaultdict[str, list[Json]](list)
        for each in samples:
            by_outcome[each["outcome"]].append(each)
        members = by_outcome.pop("member", [])
        for kind, found in by_outcome.items():
            self._pairs[kind][0].append(_features(group, [_one_of(found, "uid")]))
        features = _features(group, members)
        self._delivered.append(features)
        if members:
            self._members.append(_features(group, [_one_of(members, "uid")]))
            last = max(members, key=lambda each: float(each["at_s"]))
            until_s = last["received_at_s"]
            since_s = until_s - (last["at_s"] - group["opened_s"])
            was_in_flight = bisect_left(self._checkpoints, since_s) < bisect_left(self._checkpoints, until_s)
            self._pairs[IN_FLIGHT][not was_in_flight].append(features)
        return features

    def _add_lost(self, group: Json, samples: Sequence[Json], is_short: bool) -> Features:
        arrived = [each for each in samples if each["outcome"] != "surplus"]
        features = _features(group, arrived)
        if is_short:  # it lasted until then, whenever its last sample arrived
            features["seconds"] = group["closed_s"] - group["opened_s"] - group["idle_s"]
        # The samples that it lacks are its slowest, so those that it has do not describe it.
        if group["reason"] in ("timed_out", "stale") and len(arrived) < self._group_size:
            features = {name: value for name, value in features.items() if name == "seconds"}
        self._pairs[group["reason"]][0].append(features)
        return features

    def add_rollout(self, summary: Json) -> None:
        """Add a line of the run's trace about one attempt of a rollout; ignored if it sampled nothing."""
        if summary.get("sampled"):
            key = summary.get("ending", ""), summary["group"]
            self._rollouts[key] = _one_of([self._rollouts.get(key, summary), summary], "id")

    def report(self) -> Json:
        """The ``findings`` as sentences, the ``comparisons``, and what was dropped by ``deciles`` and ``epochs``."""
        comparisons = self._comparisons()
        return {
            "findings": self._findings(comparisons),
            "comparisons": comparisons,
            "deciles": list(self._deciles()),
            "epochs": list(self._epochs()),
        }

    def _comparisons(self) -> list[Json]:
        """Every feature of every kind that occurs, the most harmful kinds first."""
        aborted, kept = self._pairs["aborted"] = ([], [])
        for (ending, group_id), summary in self._rollouts.items():
            *_, is_delivered = self._decided.get(group_id, (None,))
            if (ending == "aborted" and is_delivered is not None) or (ending == "finished" and is_delivered):
                seconds = (summary["t"] + summary["d"] - (summary.get("started") or summary["t"])) / 1e9
                (aborted if ending == "aborted" else kept).append({"tokens": summary["sampled"], "seconds": seconds})
        has_tokens = any("tokens" in features for pair in self._pairs.values() for side in pair for features in side)
        names = [name for name in FEATURES if name != "bytes" or not has_tokens]
        asked = ((kind, name) for kind in self._pairs for name in names if (kind, name) not in _BY_DEFINITION)
        found = [row for kind, name in asked if (row := _compared(kind, name, *self._pairs[kind]))]
        judged, p = sorted((row for row in found if row["p"] is not None), key=lambda row: float(row["p"])), 0.0
        for rank, row in enumerate(judged):
            p = row["p"] = max(p, min(1.0, (len(judged) - rank) * row["p"]))
            # An aborted rollout would have become longer, so only its being longer already says something.
            difference = row["difference"] if row["kind"] == "aborted" else abs(row["difference"])
            row["is_biased"] = p < LEVEL and difference >= FEATURES[row["feature"]].least
        return sorted(found, key=_harm)

    def _findings(self, comparisons: Sequence[Json]) -> list[str]:
        """The findings, after a line that says so if no rule of this run is among them."""
        found = [_sentence(row) for row in comparisons if row["is_biased"]]
        own = [row for row in comparisons if row["kind"] != IN_FLIGHT]
        if any(row["is_biased"] for row in own):
            return found
        kinds = ", ".join(sorted({row["kind"] for row in own}))
        judged = ", ".join(sorted({row["kind"] for row in own if row["p"] is not None}))
        if judged:
            return [f"No dropping rule bends the data (compared: {judged})", *found]
        if kinds:
            return [f"Fewer than {LEAST_NUM} groups to compare: {kinds}", *found]
        if self._decided and not self._delivered:
            return [f"Dropped {counted(len(self._decided), 'group')} and delivered none: nothing to compare"]
        return ["Nothing was dropped yet", *found]

    def _deciles(self) -> Iterator[Json]:
        """The share of groups that was dropped, by tenths of the groups, fast ones first."""
        # Equal durations are in the order of a hash, which has nothing to do with what was dropped.
        timed = ((each[2], crc32(key.encode()), not each[3]) for key, each in self._decided.items())
        ordered = sorted(each for each in timed if each[0] is not None)
        for number in range(10 if len(ordered) >= 10 else 0):
            part = ordered[number * len(ordered) // 10 : (number + 1) * len(ordered) // 10]
            dropped = sum(is_dropped for *_, is_dropped in part)
            yield {"up_to_s": part[-1][0], "groups": len(part), "dropped": dropped, "drop_rate": dropped / len(part)}

    def _epochs(self) -> Iterator[Json]:
        """The number of instances up to each epoch, and how many of them were never delivered."""
        reached = dict[str, bool]()
        for epoch, groups in groupby(sorted(self._decided.values(), key=itemgetter(0)), itemgetter(0)):
            for _, instance, _, is_delivered in groups:
                reached[instance] = reached.get(instance, False) or is_delivered
            yield {"epoch": epoch, "instances": len(reached), "never_delivered": list(reached.values()).count(False)}


def _one_of(items: Sequence[Json], name: str) -> Json:
    """One of several, chosen without regard to what they contain and when they arrived."""
    return min(items, key=lambda each: crc32(each[name].encode()))


def _features(group: Json, samples: Sequence[Json]) -> dict[str, float]:
    """Features of a group with these samples. ``seconds`` last from its opening to the last of them."""
    rewards = [each["reward"] for each in samples if each["reward"] is not None]
    tokens = [each["num_tokens"] for each in samples if each["num_tokens"]]
    versions = [each["oldest_version"] for each in samples if each["oldest_version"] is not None]
    found: dict[str, float] = {}
    if samples:
        found["failed"] = 1 - len(rewards) / len(samples)
        found["bytes"] = fmean(each["num_bytes"] for each in samples)
        found["seconds"] = max(each["at_s"] for each in samples) - group["opened_s"] - group["idle_s"]
    if rewards:
        found["reward"], found["spread"] = fmean(rewards), pstdev(rewards)
    if tokens:
        found["tokens"] = fmean(tokens)
    if versions and group["weight_version"] is not None:
        found["staleness"] = group["weight_version"] - min(versions)
    return found


def _compared(kind: str, name: str, *pair: Sequence[Features]) -> Json | None:
    """Compare by one feature. Without ``LEAST_NUM`` groups on both sides there is no ``p``, and so no finding."""
    lost, delivered = ([each[name] for each in side if name in each] for side in pair)
    if not lost or not delivered:
        return None
    means, medians = (fmean(lost), fmean(delivered)), (median(lost), median(delivered))
    of_logs = math.log(max(medians[0], LEAST_S) / max(medians[1], LEAST_S))
    distance, is_enough = ks_distance(lost, delivered), min(len(lost), len(delivered)) >= LEAST_NUM
    return {
        "kind": kind,
        "feature": name,
        "num": len(lost),
        "num_delivered": len(delivered),
        "mean": means[0],
        "mean_delivered": means[1],
        "median": medians[0],
        "median_delivered": medians[1],
        "distance": distance,
        "p": ks_p_value(distance, len(lost), len(delivered)) if is_enough else None,
        "is_biased": False,
        "difference": of_logs if FEATURES[name].is_log else means[0] - means[1],
    }


def ks_p_value(distance: float, num_left: int, num_right: int) -> float:
    """The asymptotic probability of at least this distance if both are of one distribution.

    Stephens, "Use of the Kolmogorov-Smirnov, Cramér-von Mises and Related Statistics Without Extensive Tables".
    """
    root = math.sqrt(num_left * num_right / (num_left + num_right))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:  # the series converges too slowly, to 1
        return 1.0
    series = sum((-1.0) ** (term - 1) * math.exp(-2 * (term * scaled) ** 2) for term in range(1, _TERMS))
    return min(1.0, max(0.0, 2 * series))


def _sentence(row: Json) -> str:
    how = FEATURES[row["feature"]]
    name = "median" if how.is_log else "mean"
    lost, delivered = number_text(row[name]), number_text(row[f"{name}_delivered"])
    what = how.more if row["difference"] > 0 else how.less
    amounts = f"{name} {lost} against {delivered} {how.unit}".rstrip()
    return f"{RULES[row['kind']]} {what}: {amounts}, D = {row['distance']:.2f}"


def _harm(row: Json) -> tuple[bool, bool, float]:
    """Order of findings: of this run before those of a resume, and what loses many or changes much."""
    share = row["num"] / (row["num"] + row["num_delivered"])
    return (not row["is_biased"], row["kind"] == IN_FLIGHT, -share * row["distance"])
