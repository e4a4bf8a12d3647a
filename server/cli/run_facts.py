"""Text about a run, as shown by ``status`` and at the end of ``start --follow``."""

import json
import time
from typing import Any

from forebay.core.errors import ForebayError
from forebay.core.group import range_text
from forebay.server.cli.options import own_command
from forebay.server.cli.output import counts_text
from forebay.server.findings import DISCARD_REASONS, discarded_of, groups_of, problem_of, samples_of


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


def failure_of(view: dict[str, Any]) -> ForebayError:
    """An error with the first line of the run's reason; ``status`` shows tracebacks."""
    reason = str(view["reason"]).partition("\n")[0]  # a traceback may follow
    return ForebayError(
        f"{view['run_id']} failed: {reason}", hint=f"`{own_command()} status {view['run_id']}` shows the full error"
    )


def nothing_usable(view: dict[str, Any]) -> ForebayError:
    """An error for a run that ended without a group to train on."""
    discarded = ", ".join(f"{number} {reason}" for reason, number in discarded_of(view))
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
        "evaluates": _evaluates_text(view["evaluates"]),
        "evaluations": "\n".join(map(_evaluation_text, view["evaluations"])),
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
        "reward parts": _reward_parts_text(view["reward_parts"]),
        "outcomes": counts_text(view["outcomes"]),
        "tokens": _tokens_text(view["tokens"]),
        "counts": counts_text(view["counts"]) if view["counts"] else "",
        "buffered": f"{view['samples']['buffered']} samples, {view['samples']['buffered_bytes']:,} bytes",
        "trace": _trace_text(view.get("trace")),
        "hooks": "\n".join(f"{hook}: {', '.join(by)}" for hook, by in view["hooks"].items() if by),
    }


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


def _evaluates_text(evaluates: dict[str, Any] | None) -> str:
    return f"{evaluates['run_id']}, step {evaluates['step']}, on {evaluates['task']}" if evaluates else ""


def _evaluation_text(evaluation: dict[str, Any]) -> str:
    """An evaluation in one line: its step, task and weights, what counts of it, and its numbers."""
    weights, total = evaluation["weight_version"], evaluation["num_rollouts"]
    head = f"step {evaluation['step']}, {evaluation['task']}" + ("" if weights is None else f", weights {weights}")
    parts = [f"{evaluation['state']}: {evaluation['num_counted']} of {'?' if total is None else total} rollouts"]
    for name, key in (("failed", "num_failed"), ("of other weights", "num_other_weights")):
        parts += [f"{evaluation[key]} {name}"] if evaluation.get(key) else []
    if evaluation.get("mean"):
        named = {"mean": evaluation["mean"], **{f"pass@{k}": at for k, at in evaluation["pass_at"].items()}}
        parts += [f"{name} {_estimate_text(estimate)}" for name, estimate in named.items()]
    return f"{head}: " + " · ".join(parts) + (f" ({evaluation['reason']})" if evaluation["reason"] else "")


def _estimate_text(estimate: dict[str, Any]) -> str:
    bounds = "" if estimate["low"] is None else f" [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    return f"{estimate['value']:.3f}{bounds}"


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


def _discarded_text(view: dict[str, Any]) -> str:
    # A newer server may have reasons that are not known here.
    return "\n".join(f"{number} {reason}: {DISCARD_REASONS.get(reason, '')}" for reason, number in discarded_of(view))


def _rewards_text(rewards: dict[str, Any]) -> str:
    if not rewards["num"]:
        return ""
    return f"mean {rewards['mean']:.3f} · min {rewards['min']:g} · max {rewards['max']:g}"


def _reward_parts_text(parts: dict[str, dict[str, Any]]) -> str:
    """The mean of each part; "" without parts."""
    return " · ".join(f"{name} {tally['mean']:.3f}" for name, tally in parts.items())


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


def age_text(since_s: float) -> str:
    """The age of a time, in one unit."""
    seconds = max(0, int(time.time() - since_s))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
