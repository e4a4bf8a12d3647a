"""Shared by several commands: options, writable folders, the command's own name, and fast imports."""

import errno
import gc
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.files import FOLDER_MODE
from forebay.server.cli.output import echo

DEFAULT_URL = "http://127.0.0.1:8889"
PLOT_ENDINGS = (".png", ".svg")

Url = Annotated[str, typer.Option("--url", envvar="FOREBAY_URL", help="Address of the server.")]
Token = Annotated[str, typer.Option("--token", envvar="FOREBAY_TOKEN", help="The server's bearer token.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
GeneratorPaths = Annotated[
    list[Path] | None, typer.Option("--generators", help="Folder or file with generators; repeatable.")
]
ConfigPath = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]


def make_writable(folder: Path) -> Path:
    """Create ``folder`` if it is missing. Raises ``InvalidInput`` if it is not writable."""
    reason = ""
    try:
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    # Checked before anything is opened: otherwise the first write would fail during the start, with a traceback.
    if not reason and not os.access(folder, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES)
    if reason:
        hint = "give --data-dir a folder that this user can write to"
        raise InvalidInput(f"{folder} cannot be used: {reason}", hint=hint, field="data_dir")
    return folder


def check_plot(plot: Path | None) -> None:
    """Raise ``InvalidInput`` for a plot that cannot be written, before work that may take minutes."""
    if plot is None:
        return
    if plot.suffix.lower() not in PLOT_ENDINGS:
        raise InvalidInput(
            f"{plot} is not an image file", hint=f"use one of the endings {', '.join(PLOT_ENDINGS)}", field="plot"
        )
    if plot.is_dir():
        raise InvalidInput(f"{plot} is a folder", hint="--plot names the file to write", field="plot")
    if not plot.parent.is_dir():
        hint = "create it first, or choose another --plot"
        raise InvalidInput(f"there is no folder {plot.parent}", hint=hint, field="plot")


@contextmanager
def writing_plot(plot: Path) -> Iterator[None]:
    """Report that the plot was written, or raise ``ForebayError``."""
    try:
        yield
    except OSError as error:
        hint = "make room, or name another file with --plot"
        raise ForebayError(f"{plot} cannot be written: {error.strerror}", hint=hint) from None
    echo(f"wrote {plot}", err=True)


@contextmanager
def loading() -> Iterator[None]:
    """Pause the cyclic collector: imported objects stay, and scanning them repeatedly takes a tenth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def own_command() -> str:
    """How to call this command line: its name if the shell finds it, otherwise its path."""
    script = Path(sys.executable).with_name("forebay")
    if shutil.which("forebay") or not script.exists():
        return "forebay"
    return shlex.quote(str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script))
