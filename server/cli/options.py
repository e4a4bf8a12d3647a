"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8889"

Url = Annotated[str, typer.Option("--url", envvar="FOREBAY_URL", help="Address of the server.")]
Token = Annotated[str, typer.Option("--token", envvar="FOREBAY_TOKEN", help="The server's bearer token.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for scripts.")]
GeneratorPaths = Annotated[
    list[Path] | None, typer.Option("--generators", help="Folder or file with generators; repeatable.")
]
ConfigPath = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
