"""The output of ``forebay simulate``: facts of the log, the fit of its engines, and a row per variation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from forebay.server.cli.output import columns_table, facts_table, show_table
from forebay.telemetry.numbers import counted, number_text, share_text

if TYPE_CHECKING:
    from forebay.workers.simulator.recorded.engine_fit import EngineFit
    from forebay.workers.simulator.recorded.log_facts import AnswerFacts, RunFacts
    from forebay.workers.simulator.recorded.recorded_scenario import SelfCheck
    from forebay.workers.simulator.result_rows import Mean, ResultRow
    from forebay.workers.simulator.simulated_source import SimulatedFacts

LEGEND = """\
time/first: mean step time as a share of the first row's, paired by seed. waste: sampled but not trained on. stale:
weight versions between start and training. KS: distance between the lengths trained on and offered. >P90: share of
trained answers above the 90th percentile of those offered, 10 % without bias. tail kept: share of long answers to
ordinary prompts that were trained on; a redraw after a break removes them while KS looks harmless. reward: trained
minus offered. never: prompts started but never trained on. *: no other row beats it in time, waste and bias.\
"""


def show_facts(console: Console, facts: "SimulatedFacts") -> None:
    """Print the facts known before any row."""
    table = {"source": facts.title, **_answers(facts.answers)}
    if facts.run is not None:
        table |= {"run": _run(facts.run)}
    if facts.fit is not None:
        table |= {"engines": _engines(facts.fit)}
    if facts.self_check is not None:
        table |= {"self-check": _self_check(facts.self_check)}
    show_table(console, facts_table(table))
    for note in facts.notes:
        show_table(console, facts_table({"note": note}))
    console.print()


def _answers(facts: "AnswerFacts") -> dict[str, str]:
    lengths = f"median {facts.median:,.0f} tokens, P90 {facts.p90:,.0f}, longest {facts.longest:,}"
    stated = {"answers": f"{facts.num_answers:,} in {facts.num_groups:,} groups of {facts.group_size}: {lengths}"}
    if facts.cv_within is None:
        return stated
    stated["groups"] = (
        f"CV within {number_text(facts.cv_within)} (at most {number_text(facts.cv_most)}), "
        f"between {number_text(facts.cv_between)}; rank correlation of a probe and its siblings "
        f"{number_text(facts.rank_correlation)}"
    )
    stated["probe"] = (
        f"false negatives {share_text(facts.false_negatives)} (of probes below {facts.threshold:,.0f} tokens, those "
        f"with a sibling above); precision of the top fifth {share_text(facts.precision)}"
    )
    return stated


def _run(facts: "RunFacts") -> str:
    return (
        f"{facts.makespan_s:,.1f} s on {counted(facts.num_engines, 'engine')}, {facts.num_process:,} at once: engines "
        f"idle {share_text(facts.idle_share)}, slots free {share_text(facts.free_share)}, the last tenth of the "
        f"rollouts {share_text(facts.tail_share)} of the time, capped {share_text(facts.capped_share)}, in engines' "
        f"queues {share_text(facts.waiting_share)}"
    )


def _engines(fit: "EngineFit") -> str:
    costs = list(fit.costs.values())
    cost = costs[0]
    parts = [f"a step takes {cost.step_s * 1e3:.2f} ms + {cost.step_s_per_sequence * 1e3:.3f} ms a sequence"]
    if cost.prefill_tokens_per_s != float("inf"):
        parts.append(f"prompts {cost.prefill_tokens_per_s:,.0f} tokens/s, {share_text(cost.cached_share)} cached")
    speeds = sorted(each.speed for each in costs)
    if len(speeds) > 1:
        parts.append(f"speeds {speeds[0]:.2f} to {speeds[-1]:.2f}")
    parts.append(f"{cost.tool_s:.2f} s of other time per turn")
    if cost.kv_tokens is not None:
        kept = f"{share_text(cost.kv_reserve)} of the tokens that calls may still sample are kept free"
        parts.append(f"cache of {cost.kv_tokens:,} tokens, {kept}")
    if fit.is_limited_by == "places":
        parts.append(f"at most {cost.places} calls at once (places)")
    if not fit.is_limited_by:
        parts.append(f"nothing waited with up to {fit.most_at_once} at once")
    return f"{'; '.join(parts)}; half of {fit.num_calls:,} calls are off by {share_text(fit.error)} or less"


def _self_check(check: "SelfCheck") -> str:
    return f"{check.simulated_s:,.1f} s, recorded {check.recorded_s:,.1f} s: {check.error:+.1%}"


def show_rows(console: Console, rows: "Sequence[ResultRow]") -> None:
    """Print the table, and a legend of its columns."""
    has_settings = any(row.label for row in rows)
    headers = ["", "policy", *(["settings"] if has_settings else []), "engines", "at once", "step s", "p99 s"]
    headers += ["time/first", "trained tok/s", "waste", "stale", "KS", ">P90", "tail kept", "reward", "never", "idle"]
    table = columns_table(*headers, "put back")
    for row in rows:
        table.add_row(*_cells(row, has_settings))
    show_table(console, table)
    console.print()
    seeds = rows[0].num_seeds
    intervals = f"Means of {seeds} seeds, each row on the same answers; ± is the 95 % interval." if seeds > 1 else ""
    for line in [*([intervals] if intervals else []), *LEGEND.splitlines()]:
        console.print(line, markup=False, style="dim")


def _cells(row: "ResultRow", has_settings: bool) -> list[str]:
    at = row.measures
    return [
        "*" if row.is_best else "",
        row.policy,
        *([row.label] if has_settings else []),
        str(row.engines),
        str(row.num_process),
        _mean(at["step_mean_s"], ",.2f"),
        _mean(at["step_p99_s"], ",.2f"),
        _mean(row.time_ratio, ".3f"),
        _mean(at["trained_tokens_per_s"], ",.0f"),
        _mean(at["waste"], ".1%"),
        _mean(at["staleness"], ".2f"),
        _mean(at["ks"], ".3f"),
        _mean(at["above_p90"], ".1%"),
        _mean(at["tail_kept"], ".0%"),
        _mean(at["reward_gap"], "+.3f"),
        _mean(at["never_trained"], ".1%"),
        _mean(at["idle"], ".0%"),
        _mean(at["preemptions"], ",.0f"),
    ]


def _mean(value: "Mean | None", form: str) -> str:
    if value is None:
        return "-"
    margin = f" ±{value.margin:{form.replace('+', '')}}" if value.margin else ""
    return f"{value.mean:{form}}{margin}"
