"""``forebay simulate``."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.core.errors import InvalidInput
from forebay.core.lazy_names import require_extra
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url, check_plot, writing_plot
from forebay.server.cli.output import make_console, print_json
from forebay.server.cli.trace_source import DataDir, open_source

if TYPE_CHECKING:
    # Imported where it is needed, so that other commands start without it.
    from forebay.workers.simulator.result_rows import Variation
    from forebay.workers.simulator.simulated_source import SimulatedFacts, SimulatedSource

Given = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|FILE]",
        help="Id or name of a run; or its folder, a file of its trace, or the folder of verl's profile log.",
    ),
]
PopulationName = Annotated[
    str | None, typer.Option("--population", metavar="NAME", help="Generated answers: short, probe or long.")
]
Policies = Annotated[
    str | None,
    typer.Option("--policy", metavar="A,B", help="Policies to compare.  [default: the run's own, or pull]"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=JSON", help="A setting; repeating a name adds rows."),
]
Engines = Annotated[str | None, typer.Option("--engines", metavar="N,M", help="Engines, instead of the log's number.")]
Places = Annotated[
    str | None, typer.Option("--num-process", metavar="N,M", help="Concurrent rollouts, or auto; one row each.")
]
KvTokens = Annotated[int | None, typer.Option("--kv", min=2, help="Tokens in one engine's cache.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, max=10_000, help="Simulations per row, on the same answers.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw time against waste and bias: .png or .svg.")
]


def command(
    given: Given = None,
    population: PopulationName = None,
    policy: Policies = None,
    settings: Settings = None,
    engines: Engines = None,
    num_process: Places = None,
    kv: KvTokens = None,
    seeds: Seeds = 20,
    as_json: AsJson = False,
    plot: PlotFile = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    data_dir: DataDir = None,
) -> None:
    """Try schedulers on a recorded run or on generated answers: the real code in virtual time."""
    if (given is None) == (population is None):
        raise InvalidInput("give RUN|FILE, or --population", hint="exactly one of the two", field="source")
    require_extra("sim", "numpy", "scipy", "matplotlib")
    check_plot(plot)
    with _source(given, population, kv, url, token, data_dir) as source:
        wanted = _variations(source, policy, settings or [], engines, num_process)
        facts = source.facts()
        if not as_json:
            from forebay.server.cli.simulate_summary import show_facts

            show_facts(make_console(), facts)
        rows = _compare(source, wanted, seeds)
    if as_json:
        print_json(_document(facts, rows))
    else:
        from forebay.server.cli.simulate_summary import show_rows

        show_rows(make_console(), rows)
    if plot is not None:
        _draw(rows, plot)


def _document(facts: "SimulatedFacts", rows: Sequence[Any]) -> dict[str, Any]:
    stated = asdict(facts)
    if facts.self_check is not None:
        stated["self_check"]["error"] = facts.self_check.error
    document: dict[str, Any] = _finite({"schema": 1, **stated, "rows": [row.as_json() for row in rows]})
    return document


def _finite(value: Any) -> Any:
    """``value`` as JSON allows it: infinity becomes null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _source(
    given: str | None, population: str | None, kv: int | None, url: str, token: str, data_dir: Path | None
) -> "Iterator[SimulatedSource]":
    from forebay.workers.simulator.simulated_source import population_source, recorded_source

    if population is not None:
        yield population_source(population, kv)
    elif given is not None and Path(given).is_file():
        yield recorded_source(Path(given), given, kv)
    else:
        with open_source(given or "", url, token, data_dir) as source:
            yield recorded_source(source.folder, source.title, kv)


def _variations(
    source: "SimulatedSource", policy: str | None, settings: list[str], engines: str | None, num_process: str | None
) -> "list[Variation]":
    from forebay.workers.simulator.scenario_grid import variations, varied
    from forebay.workers.simulator.simulation_settings import read_settings

    policies = _listed("policy", policy) if policy is not None else [source.policy]
    numbers = [_count("engines", each) for each in _listed("engines", engines)] if engines is not None else [None]
    places: list[Any] = [None]
    if num_process is not None:
        listed = _listed("num_process", num_process)
        places = [each if each == "auto" else _count("num_process", each) for each in listed]
    wanted = list(variations(policies, numbers, places, read_settings(settings)))
    for variation in wanted:  # errors in any are reported before the first is run
        source.check(varied(source.scenario(0), variation))
    return wanted


def _listed(field: str, given: str) -> list[str]:
    values = [each.strip() for each in given.split(",") if each.strip()]
    if not values:
        option = field.replace("_", "-")
        raise InvalidInput(f"--{option} is empty", hint="give values separated by commas", field=field)
    return values


def _count(field: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= 1_000_000 or len(text) > 7:
        option = field.replace("_", "-")
        raise InvalidInput(
            f"--{option} must be between 1 and 1000000 (got {text!r:.100})",
            hint="separate several by commas",
            field=field,
        )
    return int(text)


def _compare(source: "SimulatedSource", wanted: "Sequence[Variation]", seeds: int) -> list[Any]:
    from forebay.workers.simulator.scenario_grid import compare

    console = make_console(stderr=True)
    if not console.is_terminal:
        return compare(source.scenario, wanted, seeds, lambda: None)
    total, done = seeds * len(wanted), 0
    with console.status("") as status:

        def note() -> None:
            nonlocal done
            done += 1
            status.update(f"{done} of {total} runs")

        return compare(source.scenario, wanted, seeds, note)


def _draw(rows: Sequence[Any], plot: Path) -> None:
    from forebay.workers.simulator.pareto_plot import draw

    with writing_plot(plot):
        draw(rows, plot)
