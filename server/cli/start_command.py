"""``forebay start``."""

import json
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forebay.core.errors import InvalidInput
from forebay.server.cli.client import ServerClient
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url, own_command
from forebay.server.cli.output import echo, facts_table, make_console, print_json, show_table
from forebay.server.cli.progress import RateMeter, RunProgress, make_display
from forebay.server.cli.run_facts import failure_of, nothing_usable, run_facts
from forebay.server.findings import alarm_of, has_usable_groups

FOLLOW_INTERVAL_S = 0.5
INTERRUPTED_EXIT_CODE = 130
OBJECTS = {
    "sampling_params": '{"temperature": 1.0}',
    "scheduler": '{"policy": "longest-first"}',
    "oversampling": '{"rollouts_per_group": 10}',
    "retry_budgets": '{"engine_failure": 5}',
    "evaluate": '{"tasks": {"aime": {"input_file": "aime.jsonl"}}, "every": 10}',
}
"""Fields of a run that are objects, with an example of each."""


def command(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="JSON or TOML file with the run; flags override it.")
    ] = None,
    task_type: Annotated[str | None, typer.Option(help="TASK_TYPE of the generator.")] = None,
    input_file: Annotated[str | None, typer.Option(help="Tasks, one JSON object per line.")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Samples per group.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Engine, or several separated by commas.")] = None,
    template_path: Annotated[
        str | None, typer.Option(help="Folder of the model's tokenizer and chat template.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A label to find the run.")] = None,
    num_epoch: Annotated[int | None, typer.Option(help="Passes over the input.")] = None,
    num_process: Annotated[str | None, typer.Option(help="Concurrent rollouts, or auto.")] = None,
    workers: Annotated[str | None, typer.Option(help="Processes that run rollouts, or numbers per node: 2,4.")] = None,
    backend: Annotated[str | None, typer.Option(help="Where workers run: processes, ray, inline.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    policy: Annotated[str | None, typer.Option(help="Scheduling policy: which rollout starts next, and where.")] = None,
    arrays: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Arrays per token: routed_experts,sampling_mask,top_logprobs:20."),
    ] = None,
    is_restoring: Annotated[
        bool, typer.Option("--restore-reasoning", help="Put back the reasoning that agents drop.")
    ] = False,
    evaluations: Annotated[
        list[str] | None,
        typer.Option(
            "--evaluate", metavar="FILE", help="Evaluate on these tasks, or as this JSON or TOML file says; repeatable."
        ),
    ] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Evaluate at every Nth checkpoint.")] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Replay a recorded run or file."),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Replay only these steps: 50-60,70.")] = None,
    mode: Annotated[str | None, typer.Option(help="only, or cache or repeat to generate what is missing.")] = None,
    rewards: Annotated[str | None, typer.Option(help="recorded, or again to compute them again.")] = None,
    code: Annotated[str | None, typer.Option(help="Hooks to use: recorded, or today for the current ones.")] = None,
    ignore: Annotated[
        str | None,
        typer.Option(metavar="FIELDS", help="Fields that may differ from the recording."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=JSON",
            help="Any other field, nested too: scheduler.top=0.3; repeatable.",
        ),
    ] = None,
    is_followed: Annotated[
        bool, typer.Option("--follow", help="Show progress until the run ends, then a summary.")
    ] = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Start a run and print its id."""
    flags = {
        "task_type": task_type,
        "input_file": input_file and _found_here(input_file),
        "num_repeat_per_sample": group_size,
        "remote_engine_url": engine_url,
        "template_path": template_path and _found_here(template_path),
        "name": name,
        "num_epoch": num_epoch,
        "num_process": num_process,
        "workers": workers and _counts_by_node(workers),
        "backend": backend,
        "arrays": arrays and arrays.split(","),
        "restore_reasoning": is_restoring or None,
    }
    payload = (read_payload(file) if file else {}) | {key: value for key, value in flags.items() if value is not None}
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    set_inside(payload, "sampling_params", {key: value for key, value in sampling.items() if value is not None})
    set_inside(payload, "scheduler", {"policy": policy} if policy is not None else {})
    set_inside(payload, "evaluate", {} if every is None else {"every": every})
    if evaluations:
        tasks = (payload.get("evaluate") or {}).get("tasks") or {}
        set_inside(payload, "evaluate", {"tasks": {**tasks, **dict(map(_evaluation_task, evaluations))}})
    how = {"steps": steps, "mode": mode, "rewards": rewards, "code": code, "ignore": ignore}
    set_replay(payload, replay, {key: value for key, value in how.items() if value is not None})
    for name, value in map(parse_assignment, assignments or ()):  # last: --set overrides flags, flags the file
        assign(payload, name, value)
    if policy is not None and isinstance(payload["scheduler"], dict):  # --set may have replaced it
        payload["scheduler"].setdefault("policy", policy)
    if not payload.get("task_type") and not payload.get("replay"):
        raise InvalidInput("no task type is given", hint="give --task-type NAME; `forebay generators list` lists them")
    with ServerClient(url, token) as server:
        if payload.get("run_id"):
            payload["run_id"] = server.find_run(str(payload["run_id"]))["run_id"]
        view = server.post("/v1/runs", payload)
        if not as_json:
            echo(view["run_id"])
            if view.get("replay"):
                echo(f"it replays {view['replay']['source']}", err=True)
        for warning in view["warnings"]:
            echo(f"warning: {warning}", err=True, fg="yellow")
        if is_followed:
            view = follow(server, view["run_id"])
    if as_json:
        print_json(view)
    if view["state"] == "failed":
        raise failure_of(view)
    if is_followed and not has_usable_groups(view):
        raise nothing_usable(view)


def set_replay(payload: dict[str, Any], source: str | None, how: dict[str, Any]) -> None:
    """Set the replay's source and options in a payload that may already have a replay. Raises ``InvalidInput``."""
    if source is None and not how:
        return
    before = payload.get("replay")
    given = before if isinstance(before, dict) else {} if before is None else {"source": before}
    if source is not None:
        from forebay.replay.options import is_file_name

        # A run may have the name of a local folder.
        given = {**given, "source": _found_here(source) if is_file_name(source) else source}
    if source == "":
        raise InvalidInput("--replay is empty", hint="give --replay SOURCE: a run or a file", field="replay")
    if how and not given.get("source"):
        flag = next(iter(how))
        raise InvalidInput(f"--{flag} needs --replay", hint="add --replay SOURCE", field="replay")
    if "ignore" in how:
        how = {**how, "ignore": [name.strip() for name in how["ignore"].split(",") if name.strip()]}
    payload["replay"] = {**given, **how}


def _counts_by_node(text: str) -> str | list[str]:
    """``4`` unchanged; ``2,4`` or ``[2,4]`` as a list."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return inner.split(",") if inner != text.strip() or "," in inner else text


def read_payload(file: Path) -> dict[str, Any]:
    """Read a run from a file: TOML if its name ends in .toml, otherwise JSON. Raises ``InvalidInput``."""
    try:
        text = file.read_text(encoding="utf-8")
        value = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        hint = "give the path of a JSON or TOML file"
        raise InvalidInput(f"{file} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        hint = "give a JSON object, or TOML in a *.toml file"
        raise InvalidInput(f"{file} cannot be read: {error}", hint=hint) from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{file} must contain a JSON object", hint='for example {"task_type": "math", …}')
    return value


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``name=value``. The value is JSON, or a plain string if it is not valid JSON. Raises ``InvalidInput``."""
    name, is_there, value = text.partition("=")
    if not (name and is_there):
        raise InvalidInput(f"--set {text!r} is not NAME=JSON", hint="for example --set group_timeout_seconds=60")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def assign(payload: dict[str, Any], name: str, value: Any) -> None:
    """Set a field of a payload; ``OBJECT.FIELD`` sets a nested field. Raises ``InvalidInput``."""
    outer, is_inside, inner = name.partition(".")
    if not is_inside:
        payload[name] = value
    elif outer in OBJECTS:
        set_inside(payload, outer, {inner: value})
    else:  # an object of the generator, of any depth
        set_inside(payload, outer, {})
        payload[outer] = dict(payload.get(outer) or {})
        assign(payload[outer], inner, value)


def set_inside(payload: dict[str, Any], name: str, given: dict[str, Any]) -> None:
    """Merge ``given`` into an object of a payload. Raises ``InvalidInput`` if it is not an object."""
    before = payload.get(name)
    if before is not None and not isinstance(before, dict):
        example = OBJECTS.get(name, f"--set {name}.FIELD=JSON")
        raise InvalidInput(f"{name} must be an object (got {before!a})", hint=f"for example {example}")
    if given:
        payload[name] = {**(before or {}), **given}


def _evaluation_task(file: str) -> tuple[str, dict[str, Any]]:
    """The name of an evaluation's task, from its file, and the fields that its start has of its own."""
    path = Path(file)
    return path.stem, read_payload(path) if path.suffix in (".json", ".toml") else {"input_file": _found_here(file)}


def _found_here(path_text: str) -> str:
    """The absolute path of a file or folder that exists: the server may run in another folder."""
    # A path that does not exist here is sent unchanged: the server may be on another machine.
    path = Path(path_text)
    return str(path.resolve()) if path.exists() else path_text


def follow(server: ServerClient, run_id: str) -> dict[str, Any]:
    """Show progress on stderr until the run has ended or failed, then its outcome; return its last view."""
    rate, console, shown = RateMeter(), make_console(stderr=True), set[str]()
    try:
        with make_display(console) as display:
            while True:
                view = server.get(f"/v1/runs/{run_id}")
                progress = RunProgress(view, 0.0)
                display.show(RunProgress(view, rate.update(progress.num_samples)))
                if is_over(view):
                    break
                shown = tell_alarm(console, view, shown)
                time.sleep(FOLLOW_INTERVAL_S)
    except KeyboardInterrupt:
        console.print(f"{run_id} continues; `{own_command()} stop {run_id}` stops it", markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    facts = run_facts(view)
    facts["reason"] = facts["reason"].partition("\n")[0]  # the rest is a traceback, which `status` shows
    show_table(console, facts_table(facts))
    if num_failed := view["samples"].get("failed", 0):
        text = f"failed samples: {num_failed}; `{own_command()} status {run_id} --log 20` shows why"
        console.print(text, markup=False, soft_wrap=True)
    return view


def tell_alarm(console: Console, view: dict[str, Any], shown: set[str]) -> set[str]:
    """Print the alarm once per reason, and return all reasons shown so far."""
    reasons = set(view["alarm"]["reasons"] if view["alarm"] else ())
    if reasons - shown:
        console.print(f"alarm: {alarm_of(view)}", markup=False, soft_wrap=True)
    return shown | reasons


def is_over(view: dict[str, Any]) -> bool:
    """Whether a run will produce nothing more, judged by its groups."""
    groups = view["groups"]
    # A generator without our base may have left its work to other jobs: the run waits for them, we do not.
    is_finished = view["state"] == "finished" and any(groups.values()) and not groups["open"]
    return bool(view["has_ended"]) or view["state"] == "failed" or is_finished
