"""``forebay engine``: the embedded engine."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Serve an embedded engine.")


@app.callback()
def _root() -> None: ...


@app.command("tiny")
def tiny(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 30000,
    model_path: Annotated[
        Path | None, typer.Option(help="Hugging Face folder of a causal language model; else the built-in one.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Cores that torch may use.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Tell the address as one line of JSON.")] = False,
) -> None:
    """Serve a small model on the CPU, with the API of SGLang as far as Forebay uses it.

    Without --model-path it serves a built-in model, made on the first call (about 10 s), that adds single digits, and
    often wrongly. Needs the extra `local`.
    """
    from forebay.engines.tiny.server import announce, serve

    def tell(url: str) -> None:
        typer.echo(f"the tiny engine listens on {url}")

    serve(host, port, model_path=model_path, threads=threads, on_ready=announce if as_json else tell)
