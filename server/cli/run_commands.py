"""``forebay status`` and ``forebay stop``."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forebay.core.errors import InvalidInput
from forebay.server.cli.client import ServerClient
from forebay.server.cli.gc_command import show_storage
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import (
    columns_table,
    counts_text,
    echo,
    facts_table,
    make_console,
    print_json,
    show_table,
)
from forebay.server.cli.run_facts import age_text, run_facts, state_text
from forebay.server.findings import alarm_of, groups_of, samples_of

NEWEST = 100
"""Number of runs listed without ``--all``."""
MOST_LINES = 10_000
"""Maximum number of log lines that the server returns."""
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Id or name of a run, or a unique prefix.")]


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Id or name of one run, or a unique prefix. Without it, runs are listed."),
    ] = None,
    log_lines: Annotated[int, typer.Option("--log", min=0, help="Also show this many lines of the run's log.")] = 0,
    uid: Annotated[
        str, typer.Option("--agent", metavar="UID", help="Show instead what the agent of this sample printed.")
    ] = "",
    url: Url = DEFAULT_URL,
    token: Token = "",
    lists_all: Annotated[bool, typer.Option("--all", help="List every run, not only the newest 100.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the server's newest runs, or one of them."""
    if run is None and (uid or log_lines):
        flag = "--agent" if uid else "--log"
        raise InvalidInput(f"{flag} needs one run, but none is given", hint=f"forebay status RUN {flag} …")
    if run is not None and lists_all:
        raise InvalidInput(f"--all lists every run, but one run is given: {run}", hint="leave one of the two out")
    with ServerClient(url, token) as server:
        if run is None:
            reply = server.get("/v1/runs", limit=NEWEST)
            if lists_all:
                reply["runs"] = server.runs()
            _show_all(reply, as_json)
            return
        view = server.find_run(run)
        if uid:
            reply = server.get(f"/v1/runs/{view['run_id']}/log", uid=uid, lines=log_lines or MOST_LINES)
            _show_printed(reply["lines"], as_json)
            return
        if log_lines:
            view["log"] = server.get(f"/v1/runs/{view['run_id']}/log", lines=log_lines)["lines"]
    if as_json:
        print_json(view)
    else:
        _show_one(view)


def _show_printed(lines: list[str], as_json: bool) -> None:
    if as_json:
        print_json({"lines": lines})
    else:
        echo("\n".join(lines))


def stop(run: RunName, url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """Stop a run's process. Its data is kept, and complete groups can still be read."""
    with ServerClient(url, token) as server:
        view = server.post(f"/v1/runs/{server.find_run(run)['run_id']}/stop")
    if as_json:
        print_json(view)
    else:
        echo(f"{view['run_id']} is {state_text(view)}")


def _show_all(reply: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(reply)
        return
    if reply["runs"]:
        _show_table(reply["runs"])
    else:
        echo("no run has been started yet")
    if len(reply["runs"]) == NEWEST:
        echo("older runs are listed by `forebay status --all`")
    show_storage(reply["storage"])


def _show_table(views: Sequence[dict[str, Any]]) -> None:
    table = columns_table("run", "name", "task type", "state", "groups", "samples", "started")
    for view in views:
        table.add_row(
            view["run_id"],
            view["name"] or "-",
            view["task_type"],
            state_text(view),
            counts_text(groups_of(view)),
            counts_text(samples_of(view)),
            f"{age_text(view['started_at_s'])} ago",
        )
    show_table(make_console(), table)
    for view in views:
        if view["alarm"]:
            echo(f"alarm of {view['run_id']}: {alarm_of(view)}")


def _show_one(view: dict[str, Any]) -> None:
    show_table(make_console(), facts_table({**run_facts(view), "log": "\n".join(view.get("log", []))}))
