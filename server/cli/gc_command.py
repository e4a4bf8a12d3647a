"""``forebay gc``."""

from typing import Annotated, Any

import typer

from forebay.server.cli.client import ServerClient
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import echo, facts_table, make_console, print_json, show_table
from forebay.telemetry.numbers import counted

REASONS = {
    "open": "of incomplete groups",
    "ready": "ready for a trainer",
    "leased": "leased to a trainer",
    "uncheckpointed": "delivered, not in a checkpoint yet",
    "checkpointed": "delivered, in one of the last checkpoints",
    "recent": "unusable for the trainer, but newer than the last checkpoints",
    "in_budget": "delivered or unusable, in runs without checkpoints; removed beyond max_journal_bytes",
    "replayable": "only needed for replays; removed beyond replay_bytes",
    "kept": "only needed for replays, of runs with keep_bodies; removed beyond max_journal_bytes",
    "source": "of runs that are being replayed",
    "unknown": "of runs that the server does not know",
}
"""Descriptions of the reasons for keeping bodies."""


def command(
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="Remove this ended run first, by id or name.")] = "",
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Remove stored samples that are no longer needed, and show what is kept and why."""
    with ServerClient(url, token) as server:
        gone = server.delete(f"/v1/runs/{server.find_run(run)['run_id']}")["run_id"] if run else None
        done = {"removed_run_id": gone, **server.post("/v1/gc")}
    if as_json:
        print_json(done)
    else:
        _show(done)


def storage_text(num_bytes: int, num_segments: int) -> str:
    """Size of the store, as text."""
    return f"{num_bytes:,} bytes in {counted(num_segments, 'segment')}"


def _show(done: dict[str, Any]) -> None:
    budget, over = done["max_bytes"], done["num_bytes_over"]
    facts = {
        "run": f"{done['removed_run_id']} was removed" if done["removed_run_id"] else "",
        "removed": storage_text(done["num_bytes_freed"], done["num_segments_freed"]),
        "stored": storage_text(done["num_bytes"], done["num_segments"]),
        "budget": f"{budget:,} bytes" if budget else "",
        "over it": f"{over:,} bytes, and nothing more can be removed" if over else "",
        "replays": f"up to {done['replay_bytes']:,} bytes are kept for them",
        "kept": "\n".join(f"{number:,} bytes {REASONS[reason]}" for reason, number in done["kept"].items()),
    }
    show_table(make_console(), facts_table(facts))


def show_storage(view: dict[str, Any]) -> None:
    """Print the size of the store, below a list of runs."""
    over = f", {view['num_bytes_over']:,} bytes over the budget" if view["num_bytes_over"] else ""
    replays = f", {view['num_replayable_bytes']:,} bytes only for replays" if view["num_replayable_bytes"] else ""
    echo(f"stored: {storage_text(view['num_bytes'], view['num_segments'])}{replays}{over}")
