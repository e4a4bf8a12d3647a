"""A run in words, as ``status`` and the end of ``start --follow`` show it."""

import json
import time
from typing import Any

from forebay.core.errors import ForebayError
from forebay.core.group import range_text
from forebay.server.cli.options import own_command
from forebay.server.cli.output import counts_text

DISCARD_REASONS = {
    "invalid": "all rewards equal: nothing to learn from, unless is_valid_group is your own",
    "timed_out": "too few samples at its deadline",
    "filtered": "too few samples left after the filter",
    "incomplete": "too few rows after the last hook",
    "hook_failed": "a hook failed",
    "failed": "every rollout failed",
    "unreadable": "a stored sample could not be read back",
    "stale": "the weights that made it were too old",
}
"""Why groups are discarded, in words."""


def state_text(view: dict[str, Any]) -> str:
    """The state of a run in a few words."""
    notes = {
        "has_ended": "ended",
        "is_waiting_for_engine": "waiting for its engine",
        "is_held": "held until the next weight version",
        "is_paused": "its engines are paused",
        "is_stalled": "no progress since its group deadline",
    }
    return ", ".join([view["state"], *(text for name, text in notes.items() if view[name])])


def alarm_of(view: dict[str, Any]) -> str:
    """Why little or nothing comes of the run's groups; "" where there is nothing to say."""
    return str(view["alarm"]["message"]) if view["alarm"] else ""


def failure_of(view: dict[str, Any]) -> ForebayError:
    """That a run failed, with the first line of its reason; tracebacks are left to ``status``."""
    reason = str(view["reason"]).partition("\n")[0]  # a traceback may follow
    return ForebayError(
        f"{view['run_id']} failed: {reason}", hint=f"`{own_command()} status {view['run_id']}` tells it all"
    )


def nothing_usable(view: dict[str, Any]) -> ForebayError:
    """That a run has ended, and there is nothing of it to train on."""
    discarded = ", ".join(f"{number} {reason}" for reason, number in _discarded(view))
    what = f"all its groups were discarded: {discarded}" if discarded else "it made no group"
    hint = f"`{own_command()} status {view['run_id']} --log 20` shows what it did"
    return ForebayError(f"nothing of {view['run_id']} can be trained on: {what}", hint=hint)


def run_facts(view: dict[str, Any]) -> dict[str, str]:
    """What there is to say of a run, by its label; what does not apply is empty."""
    return {
        "run": view["run_id"],
        "name": view["name"],
        "task type": view["task_type"],
        "state": state_text(view),
        "alarm": alarm_of(view),
        "reason": "" if view["reason"] in ("returned", "stopped") else view["reason"],
        "warnings": "\n".join(view["warnings"]),
        "generator": view["generator"],
        "engine": "\n".join(view["engine_urls"]),
        "input file": view["input_file"] or "",
        "started": f"{age_text(view['started_at_s'])} ago",
        "active for": f"{view['active_s']:.1f} s",
        "weight version": "" if view["weight_version"] is None else str(view["weight_version"]),
        "run defaults": ", ".join(f"{name}={json.dumps(value)}" for name, value in view["run_defaults"].items()),
        "reward range": range_text(view["settings"]["reward_range"]),
        "groups": _groups_text(view),
        "discarded": _discarded_text(view),
        "samples": counts_text(samples_of(view)),
        "rewards": _rewards_text(view["rewards"]),
        "outcomes": counts_text(view["outcomes"]),
        "tokens": _tokens_text(view["tokens"]),
        "counts": counts_text(view["counts"]) if view["counts"] else "",
        "buffered": f"{view['samples']['buffered']} samples, {view['samples']['buffered_bytes']:,} bytes",
        "hooks": "\n".join(f"{hook}: {', '.join(by)}" for hook, by in view["hooks"].items() if by),
    }


def groups_of(view: dict[str, Any]) -> dict[str, int]:
    """A run's groups in numbers. Open ones that are full are not called open: they wait for a read to judge them."""
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
    """Whether a trainer got a group of the run, or could."""
    groups = groups_of(view)
    return any(groups[state] for state in ("full", "ready", "leased", "delivered"))


def _groups_text(view: dict[str, Any]) -> str:
    total = view["num_groups_total"]
    return counts_text(groups_of(view)) + (f" (of {total})" if total is not None else "")


def _discarded(view: dict[str, Any]) -> list[tuple[str, int]]:
    return sorted(view["discarded"].items(), key=lambda item: -item[1])


def _discarded_text(view: dict[str, Any]) -> str:
    # A newer server may have reasons that are not known here.
    return "\n".join(f"{number} {reason}: {DISCARD_REASONS.get(reason, '')}" for reason, number in _discarded(view))


def _rewards_text(rewards: dict[str, Any]) -> str:
    if not rewards["num"]:
        return ""
    return f"mean {rewards['mean']:.3f} · least {rewards['min']:g} · greatest {rewards['max']:g}"


def _tokens_text(tokens: dict[str, Any]) -> str:
    if not tokens["kept"] and not tokens["wasted"]:
        return ""
    means = [
        f"{tokens[f'mean_{ending}']:,} in {article} {ending} one"
        for article, ending in (("a", "finished"), ("an", "aborted"))
        if tokens[f"mean_{ending}"] is not None
    ]
    return " · ".join([f"{tokens['kept']:,} kept", f"{tokens['wasted']:,} wasted", *means])


def samples_of(view: dict[str, Any]) -> dict[str, int]:
    """What became of a run's samples, in numbers."""
    return {name: view["samples"].get(name, 0) for name in ("member", "failed", "late", "surplus", "duplicate")}


def age_text(since_s: float) -> str:
    """How long ago that was, in one unit."""
    seconds = max(0, int(time.time() - since_s))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
