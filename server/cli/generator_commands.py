"""``forebay generators``: lists generator files, checks one, shows what implements its hooks, and writes a new one."""

import asyncio
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forebay.core.errors import ForebayError, HookFailed, InvalidInput
from forebay.server.cli.options import AsJson, ConfigPath, GeneratorPaths, own_command
from forebay.server.cli.output import columns_table, echo, facts_table, make_console, print_json, show_table
from forebay.server.cli.serve_commands import read_settings

if TYPE_CHECKING:
    from forebay.core.settings import Settings
    from forebay.generators.discovery.info import GeneratorInfo

START_LIMIT_S = 120.0

Answers = dict[str, list[str]]
"""Implementations of each hook, in the order in which they are called."""


app = typer.Typer(no_args_is_help=True, help="List, check and create generator files. No server is needed.")


@app.command("list", short_help="List generator files and what implements each hook.")
def list_all(generators: GeneratorPaths = None, config: ConfigPath = None, as_json: AsJson = False) -> None:
    """List the generators that a server started in this folder would find, and what implements each hook."""
    settings = read_settings(config, generators=generators or None)
    infos, answers = asyncio.run(_look(settings.generators, settings))
    if as_json:
        print_json({"generators": [_as_document(info, answers) for info in infos]})
    else:
        _show_list(infos, answers)


@app.command("check", short_help="Show everything that is wrong with a file.")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A generator file of any name.")],
    config: ConfigPath = None,
    as_json: AsJson = False,
) -> None:
    """Import a file in its own process; show everything that is wrong with it and what implements each hook."""
    if file.is_dir():
        hint = f"`{own_command()} generators list --generators {file}` lists its files"
        raise InvalidInput(f"{file} is a folder", hint=hint)
    if not file.is_file():
        raise InvalidInput(f"there is no file {file}", hint=f"`{own_command()} generators new TASK_TYPE` writes one")
    settings = read_settings(config)
    infos, answers = asyncio.run(_look([file], settings))
    info = next(info for info in infos if info.path == file.resolve())
    if as_json:
        print_json(_as_document(info, answers))
    else:
        _show_one(info, answers.get(info.path))
    if info.status != "ok":
        raise typer.Exit(1)


@app.command("new", short_help="Write a working generator file to start from.")
def new(
    task_type: Annotated[str, typer.Argument(metavar="TASK_TYPE", help="Name by which a start selects the generator.")],
    given_folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Folder to write to.  [default: generators; my_tasks in a checkout of Forebay]",
        ),
    ] = None,
) -> None:
    """Write a working generator file to start from; print its path and the next commands."""
    from forebay.generators.discovery.scaffold import OWN_FOLDER, default_folder, is_the_package, write_scaffold

    folder = given_folder or default_folder()
    if is_the_package(folder):
        raise InvalidInput(f"{folder} is Forebay's own package", hint="choose another --folder, or give none")
    try:
        path = write_scaffold(task_type, folder)
    except OSError as error:
        raise ForebayError(f"{folder} cannot be written: {error.strerror}") from None
    echo(str(path))
    # A server searches ./generators by default.
    where = "" if folder.resolve() == OWN_FOLDER.resolve() else f" --generators {shlex.quote(str(folder))}"
    command = own_command()
    echo(f"check it: {command} generators check {shlex.quote(str(path))}", err=True)
    echo(f"serve it: {command} serve{where}", err=True)


async def _look(given: Sequence[Path], settings: "Settings") -> "tuple[list[GeneratorInfo], dict[Path, Answers]]":
    """Every generator file with its verdict, and what implements the hooks of the usable ones."""
    from forebay.generators.discovery.catalog import Catalog

    async with Catalog(given, working_dir=Path.cwd(), inspect_timeout_s=settings.inspect_timeout_s) as catalog:
        infos = await catalog.scan()
    return infos, await _hook_answers(infos)


async def _hook_answers(infos: "Sequence[GeneratorInfo]") -> dict[Path, Answers]:
    """What implements the hooks of each usable generator: its file, an installed plugin, or the built-in."""
    from forebay.hooks.plugin_loading import installed_plugins

    usable = [info for info in infos if info.status == "ok"]
    if not installed_plugins():
        return {info.path: _answers_of_file(info) for info in usable}
    # Only a hook host may import plugins: they are third-party code.
    answers = await asyncio.gather(*(_answers_of_host(info) for info in usable))
    return {info.path: each for info, each in zip(usable, answers, strict=True)}


def _answers_of_file(info: "GeneratorInfo") -> Answers:
    from forebay.hooks.run_hooks import HookRunner

    runner = HookRunner(
        task_type=info.task_type or "", contract=info.contract, module_path=info.path, user_hooks=info.hooks
    )
    return runner.implementations()


async def _answers_of_host(info: "GeneratorInfo") -> Answers:
    from forebay.hooks import host_messages
    from forebay.hooks.host_client import HostClient

    module = str(info.path) if info.hooks else ""
    setup = host_messages.Setup(info.task_type or "", info.contract, "grpo", module, [], loads_plugins=True)
    with tempfile.TemporaryDirectory() as folder:
        host = HostClient(
            setup, time_limit_s=START_LIMIT_S, start_limit_s=START_LIMIT_S, log_path=Path(folder) / "hooks.log"
        )
        try:
            return (await host.ready()).implementations
        except HookFailed as error:
            return {
                hook: [*by, f"but loading them fails: {error.message}"] for hook, by in _answers_of_file(info).items()
            }
        finally:
            await host.close()


def _as_document(info: "GeneratorInfo", answers: dict[Path, Answers]) -> dict[str, Any]:
    """A file as ``GET /v1/generators`` shows it, and what implements its hooks."""
    return {**info.as_json(), "answered_by": answers.get(info.path, {})}


def _show_list(infos: "Sequence[GeneratorInfo]", answers: dict[Path, Answers]) -> None:
    table = columns_table("task type", "status", "from", "file")
    for info in infos:
        table.add_row(info.task_type or "-", _status_text(info), info.source, str(info.path))
    console = make_console()
    show_table(console, table)
    for info in infos:
        if info.status == "ok":
            console.print(f"\n{info.task_type}: {_hooks_line(answers[info.path])}", markup=False)
            if info.replaces:
                console.print(f"  replaces {info.replaces}", markup=False, soft_wrap=True)
        else:
            console.print(f"\n{info.path}", style="yellow" if info.replaced_by else "red", markup=False, soft_wrap=True)
            console.print(f"  {info.error}", markup=False, soft_wrap=True)


def _hooks_line(answers: Answers) -> str:
    shown = [f"{hook} by {', '.join(by)}" for hook, by in answers.items() if by not in ([], ["built-in"])]
    return "; ".join(shown) + "; other hooks built-in" if shown else "all hooks built-in"


def _status_text(info: "GeneratorInfo") -> Text:
    return Text(info.status, style={"ok": "green", "failed": "red", "skipped": "yellow"}[info.status])


def _show_one(info: "GeneratorInfo", answers: Answers | None) -> None:
    console = make_console()
    facts = {
        "file": str(info.path),
        "task type": info.task_type,
        "status": info.status,
        "problems": "\n".join(info.problems),
        "base": "forebay.generators.base" if info.imports_base else "its own",
        "contract": info.contract or ("determined by the first answer" if info.hooks else ""),
        "replaces": info.replaces and str(info.replaces),
    }
    show_table(console, facts_table(facts))
    if info.traceback:
        console.print(f"\n{info.traceback.rstrip()}", markup=False, soft_wrap=True)
    if answers is not None:
        console.print("\nhooks are implemented by")
        show_table(console, facts_table({f"  {hook}": ", ".join(by) or "-" for hook, by in answers.items()}))
