"""``forebay demo``: everything together on this machine, with only this package.

It starts a server and a tiny engine as child processes (``children.py``, through ``child.py``), starts a run of the
built-in math task, and reads its groups as slime's client does (``trainer.py``). It shows progress meanwhile and a
summary at the end.
"""

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.lazy_names import require_extra
from forebay.engines.tiny.recipe import question
from forebay.server.cli.client import ServerClient
from forebay.server.cli.demo.children import Child, Children
from forebay.server.cli.demo.trainer import SlimeTrainer
from forebay.server.cli.options import make_writable, own_command
from forebay.server.cli.output import facts_table, make_console, show_table
from forebay.server.cli.progress import RateMeter, RunProgress, make_display
from forebay.server.findings import DISCARD_REASONS

GROUP_SIZE = 8
NUM_SUMS = 100
ENGINE_LIMIT_S = 180.0
SERVER_LIMIT_S = 60.0
POLL_INTERVAL_S = 0.5
SEED = 1
INTERRUPTED_EXIT_CODE = 130


@dataclass(frozen=True)
class Demo:
    """State shared by the steps of the demo."""

    folder: Path
    console: Console
    children: Children
    stack: ExitStack
    """Exited before the children are stopped."""
    num_instances: int

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"


def command(
    num_instances: Annotated[int, typer.Option(min=1, max=NUM_SUMS, help="Tasks: sums of two digits.")] = NUM_SUMS,
    data_dir: Annotated[
        Path | None, typer.Option(help="An empty or new folder to keep everything in.  [default: one in /tmp]")
    ] = None,
) -> None:
    """Start a server and a tiny engine, run the built-in math task, and read its groups as a trainer does.

    Takes about a minute on two cores, needs no GPU or network, and leaves no process behind. Needs the extra
    `local`.
    """
    folder = make_folder(data_dir)
    require_extra("local", "torch", "transformers", "jinja2")
    console = make_console()
    console.print("Forebay demo: an engine answers sums, the buffer groups the answers, a trainer reads the groups.\n")
    with Children() as children, ExitStack() as stack:
        demo = Demo(folder, console, children, stack, num_instances)
        try:
            progress, trainer, elapsed_s = run(demo)
        except (KeyboardInterrupt, SystemExit) as stop:
            console.print(f"interrupted: stopping the run, the server and the engine. The data is in {folder}")
            code = getattr(stop, "code", None)
            raise typer.Exit(code if isinstance(code, int) else INTERRUPTED_EXIT_CODE) from None
    _show_summary(console, progress, trainer, elapsed_s, folder)
    if progress.view["state"] == "failed" or not trainer.num_rows:
        reason = str(progress.view["reason"]).partition("\n")[0]
        raise ForebayError(f"the run is {progress.view['state']}: {reason}", hint=f"see {folder}/*.log")


def make_folder(wanted: Path | None) -> Path:
    """Create the demo's folder. Raises ``InvalidInput`` if it cannot be created or is not empty."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    if any(make_writable(wanted).iterdir()):
        raise InvalidInput(f"{wanted} is not empty", hint="give the demo a new or empty folder", field="data_dir")
    return wanted.resolve()


def run(demo: Demo) -> tuple[RunProgress, SlimeTrainer, float]:
    """Run all steps; return the run's final progress, the trainer with what it read, and the seconds taken."""
    input_file = write_sums(demo.folder / "sums.jsonl", demo.num_instances)
    _show_done(demo, f"wrote {demo.num_instances} sums to {input_file}")
    # Both at once: the engine may take ten times as long to start as the server.
    engine, server = _start_engine(demo), _start_server(demo)
    with _step(demo, "starting the tiny engine (the first time, it learns to add: about 10 s)"):
        engine_url = str(json.loads(engine.first_line(ENGINE_LIMIT_S))["url"])
    _show_done(demo, f"the tiny engine answers at {engine_url}")
    with _step(demo, "starting the server"):
        server_url = server.first_line(SERVER_LIMIT_S).split()[-1]
    _show_done(demo, f"the server answers at {server_url}")
    trainer = demo.stack.enter_context(SlimeTrainer(server_url))
    client = demo.stack.enter_context(ServerClient(server_url))
    began_s = time.monotonic()
    run_id = trainer.start(start_payload(input_file, engine_url, server_url))
    demo.stack.callback(_stop_run, client, run_id)  # before the children end: the server has to stop the run
    _show_done(demo, f"started {run_id}: task type math, groups of {GROUP_SIZE}\n")
    progress = _train(demo, trainer, client, run_id)
    return progress, trainer, time.monotonic() - began_s


def write_sums(path: Path, num_instances: int) -> Path:
    """Write a dataset in slime's format: one JSON object per line, with prompt messages, label and id."""
    sums = [(left, right) for left in range(10) for right in range(10)]
    random.Random(SEED).shuffle(sums)
    with path.open("w", encoding="utf-8") as file:
        for left, right in sums[:num_instances]:
            messages = [{"role": "user", "content": question(left, right)}]
            row = {"instance_id": f"{left}+{right}", "prompt": messages, "label": str(left + right)}
            file.write(json.dumps(row) + "\n")
    return path


def start_payload(input_file: Path, engine_url: str, server_url: str) -> dict[str, Any]:
    """The payload that slime's client sends to ``/start_rollout``, with numbers as strings."""
    return {
        "num_process": "32",
        "num_epoch": "1",
        "remote_engine_url": engine_url,
        "remote_buffer_url": server_url,
        "task_type": "math",
        "input_file": str(input_file),
        "num_repeat_per_sample": str(GROUP_SIZE),
        "max_tokens": "16",
        "sampling_params": {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0},
        "tokenizer_path": "",
        "skip_instance_ids": [],
    }


def _start_engine(demo: Demo) -> Child:
    return demo.children.start(
        "tiny engine",
        "forebay.engines.tiny",
        log=demo.folder / "engine.log",
        environ=clean_environment(),
    )


def _start_server(demo: Demo) -> Child:
    arguments = ["serve", "--host", "127.0.0.1", "--port", "0", "--data-dir", str(demo.data_dir)]
    return demo.children.start(
        "server",
        "forebay.server.cli",
        *arguments,
        log=demo.folder / "server.log",
        environ=clean_environment(),
    )


def clean_environment() -> dict[str, str]:
    """This environment without Forebay settings, and without a proxy for local addresses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return {**kept, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


def _train(demo: Demo, trainer: SlimeTrainer, client: ServerClient, run_id: str) -> RunProgress:
    rate = RateMeter()
    with make_display(demo.console) as display:
        while True:
            demo.children.check_alive()
            has_more = trainer.poll()
            view = client.get(f"/v1/runs/{run_id}")
            samples_per_s = rate.update(RunProgress(view, 0.0).num_samples)
            progress = RunProgress(view, samples_per_s, trainer.rewards.value)
            display.show(progress)
            if trainer.is_over:
                return progress
            if not has_more:
                time.sleep(POLL_INTERVAL_S)


def _stop_run(client: ServerClient, run_id: str) -> None:
    """Stop an interrupted run: its engine will be gone when the data is served again."""
    with suppress(ForebayError):
        client.post(f"/v1/runs/{run_id}/stop")


def _show_done(demo: Demo, text: str) -> None:
    demo.console.print(f"[green]✓[/green] {text}", soft_wrap=True)


@contextmanager
def _step(demo: Demo, text: str) -> Iterator[None]:
    if not demo.console.is_terminal:
        demo.console.print(f"… {text}", soft_wrap=True)
        yield
        return
    with demo.console.status(text):
        yield


def _show_summary(
    console: Console, progress: RunProgress, trainer: SlimeTrainer, elapsed_s: float, folder: Path
) -> None:
    """Print a table of what happened, one delivered row, and the next commands."""
    console.print("What happened", style="bold")
    show_table(console, facts_table(_summary_facts(progress, trainer, elapsed_s)))
    if trainer.best_row is not None:
        console.print(f"A row as the trainer got it: {_row_text(trainer.best_row)}\n", markup=False, soft_wrap=True)
    console.print(
        f"Everything is kept in {folder}. To look at the run again and continue:\n"
        f"  {own_command()} serve --data-dir {folder / 'data'}\n"
        f"  {own_command()} status                    (in another terminal)\n"
        f"  {own_command()} generators new my_task    (a generator of your own)",
        markup=False,
        soft_wrap=True,
    )


def _summary_facts(progress: RunProgress, trainer: SlimeTrainer, elapsed_s: float) -> dict[str, str]:
    """Names and values of the summary."""
    groups, view = progress.groups, progress.view
    return {
        "tasks": f"{view['num_groups_total']}, {view['settings']['group_size']} samples each",
        "samples in": f"{progress.num_samples}, {view['samples'].get('failed', 0)} of them failed",
        "mean reward": "-" if progress.mean_reward is None else f"{progress.mean_reward:.3f}",
        "groups delivered": f"{groups['delivered']}, as {trainer.num_rows} rows in {trainer.num_batches} batches",
        "groups discarded": str(groups["discarded"]),
        **{f"  {reason}": f"{number}: {DISCARD_REASONS[reason]}" for reason, number in view["discarded"].items()},
        "groups left": str(groups["open"] + groups["full"] + groups["ready"]),
        "time": f"{elapsed_s:.1f} s, {progress.num_samples / elapsed_s:.0f} samples/s",
    }


def _row_text(row: dict[str, Any]) -> str:
    question = str(row["messages"][0]["content"]).splitlines()[0]
    answer = str(row["messages"][-1]["content"])
    raw = row.get("raw_reward", row["reward"])
    return f"{question!r} → {answer!r}, reward {raw:g}, normalised within its group {row['reward']:+.2f}"
