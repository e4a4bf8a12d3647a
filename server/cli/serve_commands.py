"""``forebay serve``: the buffer; ``forebay engine``: the embedded engine."""

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from forebay.core.errors import InvalidInput
from forebay.core.settings import Settings, load_settings
from forebay.server.cli.options import ConfigPath, GeneratorPaths, loading, make_writable
from forebay.server.cli.output import echo
from forebay.telemetry.log import set_up_logging

AllowedHosts = Annotated[
    str | None,
    typer.Option(
        "--allowed-hosts", metavar="NAMES", help="Names by which it may be called besides the machine's own: a,b,.c"
    ),
]


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.  [default: 8889]")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of the journal and the runs' files.  [default: forebay-data]")
    ] = None,
    generators: GeneratorPaths = None,
    config: ConfigPath = None,
    is_insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other addresses than loopback, and every name, without a token.")
    ] = False,
    allowed_hosts: AllowedHosts = None,
) -> None:
    """Run the rollout buffer server.

    Every setting can also come from --config or from a FOREBAY_* environment variable; docs/settings.md lists them.
    """
    settings = read_settings(
        config,
        host=host,
        port=port,
        data_dir=data_dir,
        generators=generators or None,
        insecure=is_insecure or None,
        allowed_hosts=allowed_hosts,
    )
    make_writable(settings.data_dir)
    with loading():  # only now: what is wrong is told without it
        from forebay.server import server_process

    set_up_logging(settings.log_level)
    bound = server_process.listen(settings)
    server_process.serve(settings, bound, lambda url: echo(f"forebay listens on {url}"))


def read_settings(config: Path | None, **flags: object) -> Settings:
    """The settings, or ``InvalidInput`` that names the first wrong one."""
    from forebay.server.runs.run_defaults import check_run_defaults

    try:
        settings = load_settings(config, **flags)
        # A variable comes before the file.
        source = "FOREBAY_RUN_DEFAULTS" if "FOREBAY_RUN_DEFAULTS" in os.environ else str(config)
        check_run_defaults(settings.run_defaults, source)
        return settings
    except FileNotFoundError as error:
        raise InvalidInput(str(error), field="config") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidInput(
            f"setting {name}: {first['msg']}, got {first.get('input')!r}",
            hint=f"settings come from flags, FOREBAY_* variables and {config or 'the file of --config'}",
            field=name,
        ) from None
    except ValueError as error:
        raise InvalidInput(f"the settings cannot be read: {error}", field="config") from None


engine_app = typer.Typer(no_args_is_help=True, help="Serve an embedded engine.")


@engine_app.callback()
def _engine() -> None: ...  # with a callback, the only command below keeps its name


@engine_app.command("tiny", short_help="Serve a small model on the CPU.")
def tiny(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 30000,
    model_path: Annotated[
        Path | None, typer.Option(help="Hugging Face folder of a causal language model; else the built-in one.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Cores that torch may use.")] = 1,
    allowed_hosts: AllowedHosts = None,
    is_insecure: Annotated[bool, typer.Option("--insecure", help="Let it be called by every name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Tell the address as one line of JSON.")] = False,
) -> None:
    """Serve a small model on the CPU, with the API of SGLang as far as Forebay uses it.

    Without --model-path it serves a built-in model, made on the first call (about 10 s), that adds single digits, and
    often wrongly. Needs the extra `local`.
    """
    from forebay.engines.tiny.server import announce, serve

    def show(url: str) -> None:
        echo(f"the tiny engine listens on {url}")

    serve(
        host,
        port,
        model_path=model_path,
        threads=threads,
        allowed_hosts=allowed_hosts or "",
        insecure=is_insecure,
        on_ready=announce if as_json else show,
    )
