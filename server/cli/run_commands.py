"""``forebay status`` and ``forebay stop``."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from forebay.core.errors import ForebayError
from forebay.server.cli.client import ServerClient
from forebay.server.cli.gc_command import show_storage
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import counts_text, facts_table, make_console, print_json

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or the name it was started under.")]


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id or name of one run; all are listed without it.")
    ] = None,
    log_lines: Annotated[int, typer.Option("--log", min=0, help="Show this many lines of the run's log, too.")] = 0,
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Show the server's runs, or one of them."""
    with ServerClient(url, token) as server:
        if run is None:
            _show_all(server.get("/v1/runs"), as_json)
            return
        view = server.find_run(run)
        if log_lines:
            view["log"] = server.get(f"/v1/runs/{view['run_id']}/log", lines=log_lines)["lines"]
    if as_json:
        print_json(view)
    else:
        _show_one(view)


def stop(run: RunName, url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """End a run's process. Its data stays, and what is complete can still be read."""
    with ServerClient(url, token) as server:
        view = server.post(f"/v1/runs/{server.find_run(run)['run_id']}/stop")
    if as_json:
        print_json(view)
    else:
        typer.echo(f"{view['run_id']} is {state_text(view)}")


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


def failure_of(view: dict[str, Any]) -> ForebayError:
    """That a run failed, with the first line of its reason; tracebacks are left to ``status``."""
    reason = str(view["reason"]).partition("\n")[0]  # a traceback may follow
    return ForebayError(f"{view['run_id']} failed: {reason}", hint=f"`forebay status {view['run_id']}` tells it all")


def _show_all(reply: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(reply)
        return
    if reply["runs"]:
        _show_table(reply["runs"])
    else:
        typer.echo("no run was started yet")
    show_storage(reply["storage"])


def _show_table(views: Sequence[dict[str, Any]]) -> None:
    table = Table("run", "name", "task type", "state", "groups", "samples", "started", box=None, padding=(0, 2, 0, 0))
    for view in views:
        table.add_row(
            view["run_id"],
            view["name"] or "-",
            view["task_type"],
            state_text(view),
            counts_text(view["groups"]),
            counts_text(samples_of(view)),
            f"{_age(view['started_at_s'])} ago",
        )
    make_console().print(table)


def _show_one(view: dict[str, Any]) -> None:
    facts = {
        "run": view["run_id"],
        "name": view["name"],
        "task type": view["task_type"],
        "state": state_text(view),
        "reason": "" if view["reason"] in ("returned", "stopped") else view["reason"],
        "generator": view["generator"],
        "input file": view["input_file"],
        "started": f"{_age(view['started_at_s'])} ago",
        "weight version": view["weight_version"],
        "groups": _groups_text(view),
        "discarded": counts_text(view["discarded"]),
        "samples": counts_text(samples_of(view)),
        "outcomes": counts_text(view["outcomes"]),
        "tokens": _tokens_text(view["tokens"]),
        "counts": counts_text(view["counts"]) if view["counts"] else "",
        "buffered": f"{view['samples']['buffered']} samples, {view['samples']['buffered_bytes']:,} bytes",
        "hooks": "\n".join(f"{hook}: {', '.join(by)}" for hook, by in view["hooks"].items() if by),
        "log": "\n".join(view.get("log", [])),
    }
    make_console().print(facts_table(facts), markup=False)


def _groups_text(view: dict[str, Any]) -> str:
    total = view["num_groups_total"]
    return counts_text(view["groups"]) + (f" (of {total})" if total is not None else "")


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


def _age(since_s: float) -> str:
    seconds = max(0, int(time.time() - since_s))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
