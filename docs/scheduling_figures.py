"""Generate docs/scheduling_figures.md: every policy on three populations, with and without a KV limit.

``python docs/scheduling_figures.py [--seeds 20]``. It takes some minutes. Equal seeds produce equal figures.
"""

import argparse
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from forebay.core.scheduling.oversampling import Oversampling
from forebay.workers.simulator import populations
from forebay.workers.simulator.result_rows import Mean, ResultRow, Variation
from forebay.workers.simulator.scenario import Scenario
from forebay.workers.simulator.scenario_grid import compare
from forebay.workers.simulator.simulated_source import PopulationSource, population_source

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- figures: python docs/scheduling_figures.py -->", "<!-- end of the figures -->"
POPULATIONS = {
    "short": "median 380 tokens, spread 0.4, 26 % within, cap 1 024",
    "probe": "P-DSR's: median 500, spread 0.4, 30 ± 10 % within, 1 % times 2 to 6, cap 2 048",
    "long": "median 4 000, spread 0.7, 35 % within, cap 32 768",
}
KV_TOKENS = {"short": 11_000, "probe": 14_000, "long": 40_000}
"""KV tokens of each engine: about 0.6 times what its slots need at the median length."""
ROWS = (
    ("static", {}),
    ("pull", {}),
    ("longest-first", {}),
    ("longest-first", {"history": True}),
    ("probe", {}),
    ("probe", {"scheduler": {"cap": "own"}}),
    ("probe", {"scheduler": {"cap": "none"}}),
    ("probe", {"scheduler": {"fast_concurrency": 1}}),
)
NUM_STEPS, GROUPS_PER_STEP = 30, 16
STEP_ROWS = tuple(
    ("pull", {"oversampling": {"groups_per_step": GROUPS_PER_STEP, **settings}})
    for settings in (
        {"leftover": "defer", "groups_begun": GROUPS_PER_STEP},  # a step begins only the groups that it needs
        {"leftover": "defer", "groups_begun": GROUPS_PER_STEP * 5 // 4},
        {"leftover": "discard"},
        {"leftover": "keep"},
    )
)
COLUMNS = {
    "s": ("step_mean_s", ",.1f"),
    "tokens/s": ("trained_tokens_per_s", ",.0f"),
    "waste": ("waste", ".1%"),
    "broken": ("broken", ".1%"),
    "KS": ("ks", ".3f"),
    "above P90": ("above_p90", ".1%"),
    "tail kept": ("tail_kept", ".0%"),
    "reward gap": ("reward_gap", "+.3f"),
    "engines idle": ("idle", ".0%"),
    "put back": ("preemptions", ",.0f"),
}


class _Slower:
    """A population on engines of which every other one takes twice as long."""

    def __init__(self, source: PopulationSource) -> None:
        self._source = source

    def scenario(self, seed: int) -> Scenario:
        scenario = self._source.scenario(seed)
        speeds = (1.0, 0.5) * len(scenario.engines)
        engines = [replace(cost, speed=speed) for cost, speed in zip(scenario.engines, speeds, strict=False)]
        return replace(scenario, engines=engines)


class _InSteps:
    """A population for a run of many steps."""

    def __init__(self, source: PopulationSource, population: str) -> None:
        self._source, self._population = source, populations.POPULATIONS[population]

    def scenario(self, seed: int) -> Scenario:
        prompts = self._population.prompts(2 * NUM_STEPS * GROUPS_PER_STEP, seed)
        held = Oversampling(groups_per_step=GROUPS_PER_STEP)
        return replace(self._source.scenario(seed), prompts=prompts, num_steps=NUM_STEPS, oversampling=held)


def table(name: str, kind: str, seeds: int) -> str:
    """The rows of one population."""
    source = population_source(name, KV_TOKENS[name] if kind == "kv" else None)
    make = {"speeds": _Slower(source).scenario, "steps": _InSteps(source, name).scenario}.get(kind, source.scenario)
    rows = STEP_ROWS if kind == "steps" else ROWS
    wanted = [Variation(policy, None, None, tuple(settings.items())) for policy, settings in rows]
    made = compare(make, wanted, seeds, lambda: None)
    first = next(row for row in made if row.policy == "pull")
    lines = [f"| policy | time / `pull` | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    return "\n".join([*lines, *(_line(row, first) for row in made)])


def _line(row: ResultRow, pull: ResultRow) -> str:
    label = row.label.replace("history=true", "after one recorded epoch")
    label = re.sub("(scheduler|oversampling)=", "", label)
    mine, base = row.measures["step_mean_s"], pull.measures["step_mean_s"]
    assert mine is not None
    assert base is not None
    cells = [_cell(row.measures[measure], form) for measure, form in COLUMNS.values()]
    name = f"`{row.policy}`" + (f" {label}" if label.startswith("after") else f" `{label}`" if label else "")
    return f"| {name} | {mine.mean / base.mean:.3f} | {' | '.join(cells)} |"


def _cell(value: Mean | None, form: str) -> str:
    if value is None:
        return "-"
    margin = f" ± {value.margin:{form.lstrip('+')}}" if form == ",.1f" and value.margin else ""
    return f"{value.mean:{form}}{margin}"


KINDS = {
    "plain": "without a KV limit",
    "kv": "with {kv} KV tokens on each engine",
    "speeds": "without a KV limit, every other engine half as fast",
    "steps": f"without a KV limit, {NUM_STEPS} steps of {GROUPS_PER_STEP} groups with over-sampling",
}


def figures(seeds: int) -> str:
    """The section between the markers."""
    wanted = [(name, kind) for name in POPULATIONS for kind in KINDS]
    with ProcessPoolExecutor(max_workers=2) as pool:
        made = pool.map(table, *zip(*wanted, strict=True), [seeds] * len(wanted))
        parts = [
            f"**{name}** ({POPULATIONS[name]}),\n{KINDS[kind].format(kv=f'{KV_TOKENS[name]:,}')}:\n\n{text}"
            for (name, kind), text in zip(wanted, made, strict=True)
        ]
    head = f"Means of {seeds} seeds, each policy on the same answers; ± is the 95 % interval over seeds."
    return "\n\n".join([BEGIN, head, *parts, END])


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    section = figures(parser.parse_args().seeds)
    page = PAGE.read_text(encoding="utf-8")
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    PAGE.write_text(re.sub(pattern, lambda _: section, page, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
