"""``forebay serve``: the buffer; ``forebay engine``: the embedded engine, a recorder, and a replayed engine."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.core.errors import InvalidInput
from forebay.server.cli.options import ConfigPath, GeneratorPaths, loading, make_writable
from forebay.server.cli.output import echo
from forebay.telemetry.log import set_up_logging
from forebay.telemetry.numbers import counted

if TYPE_CHECKING:
    from forebay.core.settings import Settings
    from forebay.replay.engine.served_engine import ServedEngine

AllowedHosts = Annotated[
    str | None,
    typer.Option("--allowed-hosts", metavar="NAMES", help="Host names allowed besides the machine's own: a,b,.c"),
]


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.  [default: 8889]")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of the journal and the runs' files.  [default: forebay-data]")
    ] = None,
    generators: GeneratorPaths = None,
    config: ConfigPath = None,
    is_insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow any address and host name without a token.")
    ] = False,
    allowed_hosts: AllowedHosts = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Run or recording for slime's starts to replay."),
    ] = None,
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
        replay=replay,
    )
    make_writable(settings.data_dir)
    with loading():  # only now: errors above are reported without waiting for imports
        from forebay.server import server_process

    set_up_logging(settings.log_level, settings.log_format)
    bound = server_process.listen(settings)
    # If it listens on every address, show one that other machines can use.
    others = (
        f", for other machines on http://{gethostname()}:{bound.getsockname()[1]}" if is_open(settings.host) else ""
    )
    server_process.serve(settings, bound, lambda url: echo(f"forebay listens on {url}{others}\nits page: {url}/ui/"))


def is_open(host: str) -> bool:
    """Whether ``host`` stands for every address of the machine."""
    return host in ("0.0.0.0", "::")  # noqa: S104 - recognised here, not bound


def read_settings(config: Path | None, **flags: object) -> "Settings":
    """Read the settings. Raises ``InvalidInput`` that names the first wrong one."""
    # Imported here, because commands that only call a server need no settings.
    from pydantic import ValidationError

    from forebay.core.settings import load_settings
    from forebay.server.runs.start_fields import check_run_defaults

    try:
        settings = load_settings(config, **flags)
        # A variable overrides the file.
        source = "FOREBAY_RUN_DEFAULTS" if "FOREBAY_RUN_DEFAULTS" in os.environ else str(config)
        check_run_defaults(settings.run_defaults, source)
        return settings
    except FileNotFoundError as error:
        raise InvalidInput(str(error), field="config") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidInput(
            f"setting {name}: {first['msg']} (got {first.get('input')!r})",
            hint=f"settings come from flags, FOREBAY_* variables and {config or 'the file of --config'}",
            field=name,
        ) from None
    except ValueError as error:
        raise InvalidInput(f"the settings cannot be read: {error}", field="config") from None


engine_app = typer.Typer(no_args_is_help=True, help="Serve an embedded engine, or record and replay one.")


IsInsecure = Annotated[bool, typer.Option("--insecure", help="Allow every host name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")]
EngineHost = Annotated[str, typer.Option(help="Address to listen on.")]
EnginePort = Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")]
Recording = Annotated[Path, typer.Argument(metavar="FILE", help="Recording of calls: calls.fbr.")]


@engine_app.command("tiny", short_help="Serve a small model on the CPU.")
def tiny(
    host: EngineHost = "127.0.0.1",
    port: EnginePort = 30000,
    model_path: Annotated[
        Path | None, typer.Option(help="Hugging Face folder of a causal language model; default: built-in.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Cores that torch may use.")] = 1,
    allowed_hosts: AllowedHosts = None,
    is_insecure: IsInsecure = False,
    as_json: AsJson = False,
) -> None:
    """Serve a small model on the CPU, with the part of SGLang's API that Forebay uses.

    Without --model-path it serves a built-in model, created on the first call (about 10 s), that adds single digits,
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


@engine_app.command("record", short_help="Record an engine's answers in a file.")
def record(
    file: Recording,
    upstream: Annotated[str, typer.Option(metavar="URL", help="The engine that answers.")],
    host: EngineHost = "127.0.0.1",
    port: EnginePort = 30000,
    allowed_hosts: AllowedHosts = None,
    is_insecure: IsInsecure = False,
    as_json: AsJson = False,
) -> None:
    """Forward calls to an engine and record its answers in FILE, which is created or appended to.

    Give clients this address instead of the engine's. It runs until SIGTERM or Ctrl-C. Calls in flight then have 2 s
    to finish, and it prints what it has recorded.
    """
    from forebay.replay.engine.engine_recorder import EngineRecorder

    names, announce = allowed_hosts or "", _announcing("the recorder", as_json)
    recorder = EngineRecorder(file, upstream, host=host, port=port, allowed_hosts=names, insecure=is_insecure)
    _serve(recorder, announce)
    counts = {"recorded": recorder.num_recorded, "broken_off": recorder.num_broken_off, "lost": recorder.num_lost}
    if as_json:
        typer.echo(json.dumps({"event": "ended", **counts}))
    else:
        echo(_kept(file, **counts))


@engine_app.command("replay", short_help="Replay an engine's recorded answers.")
def replay(
    file: Recording,
    speed: Annotated[float, typer.Option(help="0: answer at once; 1: at the recorded speed; 2: twice as fast.")] = 0.0,
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="Engine for calls that are missing; they are added to FILE.")
    ] = None,
    is_again: Annotated[
        bool, typer.Option("--again", help="Start over when a request's recorded answers run out.")
    ] = False,
    host: EngineHost = "127.0.0.1",
    port: EnginePort = 30000,
    allowed_hosts: AllowedHosts = None,
    is_insecure: IsInsecure = False,
    as_json: AsJson = False,
) -> None:
    """Replay the answers recorded in FILE, without the engine, until SIGTERM or Ctrl-C.

    A call that was not recorded gets a 422 that names the nearest request. The exit code is 1 if there was any.
    """
    from forebay.replay.engine.recorded_engine import RecordedEngine

    names, announce = allowed_hosts or "", _announcing("the recorded engine", as_json)
    place: dict[str, Any] = {"host": host, "port": port, "allowed_hosts": names, "insecure": is_insecure}
    _serve(RecordedEngine(file, speed, upstream, again=is_again, **place), announce)


def _kept(file: Path, *, recorded: int, broken_off: int, lost: int) -> str:
    parts = [f"{counted(recorded, 'answer')} added to {file}"]
    if broken_off:
        calls = "1 call in flight was" if broken_off == 1 else f"{broken_off:,} calls in flight were"
        parts.append(f"{calls} cut off and not recorded")
    if lost:
        parts.append(f"{lost:,} could not be written")
    return "; ".join(parts)


def _serve(engine: "ServedEngine", announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_stopped(engine, announce))


async def _serve_until_stopped(engine: "ServedEngine", announce: Callable[[str], None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with engine:
        announce(engine.url)
        await stopped.wait()


def _announcing(what: str, as_json: bool) -> Callable[[str], None]:
    set_up_logging("warning")
    if as_json:
        return lambda url: typer.echo(json.dumps({"event": "ready", "url": url}))
    return lambda url: echo(f"{what} listens on {url}")
