"""Text about a run, as shown by ``status`` and at the end of ``start --follow``."""

import json
import time
from typing import Any

from forebay.core.errors import ForebayError
from forebay.core.group import range_text
from forebay.server.cli.options import own_command
from forebay.server.cli.output import counts_text

DISCARD_REASONS = {
    "invalid": "all rewards are equal, so there is nothing to learn, unless is_valid_group is your own",
    "timed_out": "too few samples at its deadline",
    "filtered": "too few samples left after the filter",
    "incomplete": "too few rows after the last hook",
    "hook_failed": "a hook failed",
    "failed": "every rollout failed",
    "unreadable": "a stored sample could not be read back",
    "stale": "the weights that generated it were too old",
}
"""Descriptions of the reasons for discarding groups."""


def state_text(view: dict[str, Any]) -> str:
    """The state of a run as text."""
    notes = {
        "has_ended": "ended",
        "is_waiting_for_engine": "waiting for its engine",
        "is_held": "paused until the next weight version",
        "is_paused": "its engines are paused",
        "is_stalled": "no progress since its group deadline",
    }
    return ", ".join([view["state"], *(text for name, text in notes.items() if view[name])])


def alarm_of(view: dict[str, Any]) -> str:
    """Why the run yields few or no groups; "" without an alarm."""
    return str(view["alarm"]["message"]) if view["alarm"] else ""


def problem_of(view: dict[str, Any]) -> str:
    """The most urgent problem: the alarm, or why the trainer has received nothing so far; "" if neither."""
    groups, samples, discarded = groups_of(view), samples_of(view), _discarded(view)
    if alarm := alarm_of(view):
        return alarm
    if samples["failed"] and not samples["member"]:
        failures = {outcome: number for outcome, number in view["outcomes"].items() if number}
        return f"all {samples['failed']} rollouts so far failed: {counts_text(failures)}"
    if discarded and not has_usable_groups(view):
        (reason, _), *_ = discarded
        total = sum(number for _, number in discarded)
        return f"all {total} finished groups were discarded, most as {reason}: {DISCARD_REASONS.get(reason, '')}"
    waiting = groups["full"] + groups["ready"]
    if waiting and not (groups["leased"] or groups["delivered"]):
        return f"{waiting} groups are waiting, but no trainer has read a batch of this run yet"
    return ""


def failure_of(view: dict[str, Any]) -> ForebayError:
    """An error with the first line of the run's reason; ``status`` shows tracebacks."""
    reason = str(view["reason"]).partition("\n")[0]  # a traceback may follow
    return ForebayError(
        f"{view['run_id']} failed: {reason}", hint=f"`{own_command()} status {view['run_id']}` shows the full error"
    )


def nothing_usable(view: dict[str, Any]) -> ForebayError:
    """An error for a run that ended without a group to train on."""
    discarded = ", ".join(f"{number} {reason}" for reason, number in _discarded(view))
    what = f"all its groups were discarded: {discarded}" if discarded else "it produced no group"
    hint = f"`{own_command()} status {view['run_id']} --log 20` shows what it did"
    return ForebayError(f"{view['run_id']} has no groups to train on: {what}", hint=hint)


def run_facts(view: dict[str, Any]) -> dict[str, str]:
    """Facts about a run by label; those that do not apply are empty."""
    return {
        "problem": problem_of(view),
        "run": view["run_id"],
        "name": view["name"],
        "task type": view["task_type"],
        "state": state_text(view),
        "reason": "" if view["reason"] in ("returned", "replayed", "stopped") else view["reason"],
        "warnings": "\n".join(view["warnings"]),
        "generator": view["generator"],
        "engine": "\n".join(view["engine_urls"]),
        "input file": view["input_file"] or "",
        "replays": _replay_text(view),
        "started": f"{age_text(view['started_at_s'])} ago",
        "active for": f"{view['active_s']:.1f} s",
        "weight version": "" if view["weight_version"] is None else str(view["weight_version"]),
        "run defaults": ", ".join(f"{name}={json.dumps(value)}" for name, value in view["run_defaults"].items()),
        "scheduler": _scheduler_text(view.get("scheduler")),
        "workers": "\n".join(map(_worker_text, view.get("workers", []))),
        "reward range": range_text(view["settings"]["reward_range"]),
        "groups": _groups_text(view),
        "idle": _idle_text(view.get("num_groups_idle", 0)),
        "discarded": _discarded_text(view),
        "samples": counts_text(samples_of(view)),
        "rewards": _rewards_text(view["rewards"]),
        "outcomes": counts_text(view["outcomes"]),
        "tokens": _tokens_text(view["tokens"]),
        "counts": counts_text(view["counts"]) if view["counts"] else "",
        "buffered": f"{view['samples']['buffered']} samples, {view['samples']['buffered_bytes']:,} bytes",
        "trace": _trace_text(view.get("trace")),
        "hooks": "\n".join(f"{hook}: {', '.join(by)}" for hook, by in view["hooks"].items() if by),
    }


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


def replayed_text(view: dict[str, Any]) -> str:
    """Counts of what was replayed instead of generated; "" without a replay."""
    if not view.get("replay"):
        return ""
    names = {"replay_hits": "replayed", "replay_misses": "missed", "replay_substitutes": "substitutes"}
    numbers = {label: view["counts"].get(name, 0) for name, label in names.items()}
    shown = {label: number for label, number in numbers.items() if number or label == "replayed"}
    return f"{counts_text(shown)} · {view['counts'].get('replay_tokens', 0):,} tokens not generated again"


def _replay_text(view: dict[str, Any]) -> str:
    replay = view.get("replay")
    if not replay:
        return ""
    name = f" ({replay['name']})" if replay["name"] else ""
    return f"{replay['source']}{name}, recorded {age_text(replay['recorded_at_s'])} ago: {replayed_text(view)}"


def _worker_text(worker: dict[str, Any]) -> str:
    where = f" on {worker['node']}" if worker["node"] else ""
    num_restarts = worker["num_restarts"]
    restarts = f", {num_restarts} restart{'s' * (num_restarts > 1)}" if num_restarts else ""
    memory = f", {worker['rss_bytes'] / 2**20:.0f} MiB" if worker["rss_bytes"] else ""
    text = f"{worker['number']}{where}: {worker['state']}, {worker['num_in_flight']} in flight{restarts}{memory}"
    if worker["blocked_s"]:
        text += f"; its event loop is blocked for {worker['blocked_s']:.0f} s: {worker['blocked_at']}"
    if worker["reason"]:
        what = "waits for placement" if worker["state"] == "unplaced" else "previous worker"
        text += f"; {what}: {worker['reason']}"
    return text


def _groups_text(view: dict[str, Any]) -> str:
    total = view["num_groups_total"]
    return counts_text(groups_of(view)) + (f" (of {total})" if total is not None else "")


def _idle_text(number: int) -> str:
    """How many open groups do not age; "" for none."""
    have = "has" if number == 1 else "have"
    return f"{number} of the open groups {have} no rollout in flight: their deadlines are paused" if number else ""


def _discarded(view: dict[str, Any]) -> list[tuple[str, int]]:
    return sorted(view["discarded"].items(), key=lambda item: -item[1])


def _discarded_text(view: dict[str, Any]) -> str:
    # A newer server may have reasons that are not known here.
    return "\n".join(f"{number} {reason}: {DISCARD_REASONS.get(reason, '')}" for reason, number in _discarded(view))


def _rewards_text(rewards: dict[str, Any]) -> str:
    if not rewards["num"]:
        return ""
    return f"mean {rewards['mean']:.3f} · min {rewards['min']:g} · max {rewards['max']:g}"


def _tokens_text(tokens: dict[str, Any]) -> str:
    if not tokens["kept"] and not tokens["wasted"]:
        return ""
    means = [
        f"{tokens[f'mean_{ending}']:,} per {ending} rollout"
        for ending in ("finished", "aborted")
        if tokens[f"mean_{ending}"] is not None
    ]
    return " · ".join([f"{tokens['kept']:,} kept", f"{tokens['wasted']:,} wasted", *means])


def _scheduler_text(scheduler: dict[str, Any] | None) -> str:
    """The policy and its settings; "" without one, or from an older server."""
    if not scheduler:
        return ""
    settings = [f"{name}={json.dumps(value)}" for name, value in scheduler.items() if name != "policy"]
    return f"{scheduler['policy']}: {', '.join(settings)}"


def _trace_text(trace: dict[str, Any] | None) -> str:
    """Problems of the run's trace; "" for none, or if the server records no traces."""
    if not trace:
        return ""
    ended = "stopped: the disk is full or failed; recording resumes at the next start" if trace["has_ended"] else ""
    dropped = counts_text({f"{what} left out": number for what, number in trace["dropped"].items() if number})
    return " · ".join(part for part in (ended, dropped) if part)


def samples_of(view: dict[str, Any]) -> dict[str, int]:
    """Counts of a run's samples by outcome."""
    return {name: view["samples"].get(name, 0) for name in ("member", "failed", "late", "surplus", "duplicate")}


def age_text(since_s: float) -> str:
    """The age of a time, in one unit."""
    seconds = max(0, int(time.time() - since_s))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
