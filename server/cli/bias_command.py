"""``forebay bias``: how the groups that the trainer received differ from what it did not receive."""

import json
import math
from collections.abc import Iterable
from typing import Any

from forebay.server.cli.client import ServerClient
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import columns_table, echo, make_console, print_json, show_table
from forebay.server.cli.run_commands import RunName
from forebay.telemetry.numbers import number_text, seconds_text, share_text

PAGE_GROUPS = 100

Json = dict[str, Any]


def command(run: RunName, url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """Compare what the trainer received with what was discarded, late, surplus or aborted, by length and reward."""
    with ServerClient(url, token) as server:
        view = server.find_run(run)
        report = {"run_id": view["run_id"], **_report(server, view)}
    if as_json:
        print_json(report)
    else:
        _show(report)


def _report(server: ServerClient, view: Json) -> Json:
    from forebay.server.cli.bias import Bias

    path, after = f"/v1/runs/{view['run_id']}", ""
    times = [each["at_s"] for each in server.get(f"{path}/checkpoints")["checkpoints"]]
    was_stopped = view["state"] in ("stopped", "failed")
    bias = Bias(view["settings"]["group_size"], times, view["process_ended_s"] if was_stopped else math.inf)
    while page := server.get(f"{path}/groups", samples="true", limit=PAGE_GROUPS, after=after)["groups"]:
        for group in page:
            bias.add_group(group)
        after = page[-1]["group_id"]
    for line in server.download(f"{path}/trace?kind=rollout").splitlines():
        bias.add_rollout(json.loads(line))
    return bias.report()


def _show(report: Json) -> None:
    for sentence in report["findings"]:
        echo(f"{sentence}.")
    headers = "kind", "by", "lost", "delivered", "mean lost", "delivered", "median lost", "delivered", "D", "p", ""
    _section("What was not delivered, against what was", headers, map(_cells, report["comparisons"]))
    tenths = (
        (seconds_text(row["up_to_s"]), str(row["groups"]), str(row["dropped"]), share_text(row["drop_rate"]))
        for row in report["deciles"]
    )
    _section("Groups that were dropped, by tenths of their duration", ("up to", "groups", "dropped", "share"), tenths)
    epochs = (tuple(map(str, row.values())) for row in report["epochs"])
    _section("Instances that were never delivered", ("up to epoch", "instances", "never delivered"), epochs)


def _cells(row: Json) -> tuple[str, ...]:
    kind, feature, *numbers, distance, p, is_biased, _ = row.values()
    shown = "-" if p is None else f"{p:.2g}"
    return (kind, feature, *map(number_text, numbers), f"{distance:.2f}", shown, "biased" if is_biased else "")


def _section(title: str, headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = columns_table(*headers)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        echo(f"\n{title}:")
        show_table(make_console(), table)
