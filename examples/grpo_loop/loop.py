"""A complete RL loop on this machine, in which a tiny model gets better at adding.

    python examples/grpo_loop/loop.py --dir /tmp/rl

Kill any of its processes and start it again with the same --dir: it resumes where it was.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from history import History, describe, draw, make_entry, save_picture
from rich.console import Console
from rich.live import Live
from services import Services, alone_in, served_model, update_engine
from trainer import NUM_KEPT, Recipe, Trainer, model_folders, step_folder

from forebay.client import Batch, BufferClient
from forebay.core.errors import CheckpointNotFound, ForebayError, InvalidInput, RunEnded
from forebay.engines.tiny.model import ensure_model
from forebay.engines.tiny.recipe import question
from forebay.server.cli.demo.children import Children

RUN_NAME = "grpo-loop"
RETRY_FOR_S = 2.0
"""Short, because the server is a child of this program: a dead one returns only when the loop is started again."""
POLL_S = 2.0
PLENTY_OF_EPOCHS = 100_000
MAX_STALENESS = 2
OVER = ("failed", "stopped")
"""States of a run that generates nothing any longer."""


@dataclass(frozen=True)
class Loop:
    """The parts of the loop, and the order of actions in a step."""

    client: BufferClient
    trainer: Trainer
    history: History
    models: Path
    num_groups: int
    num_models: int
    check_alive: Callable[[], None]

    def resume(self) -> None:
        """Rewind to the newest visible model: groups that it was not trained on are ready again, unchanged."""
        step = self.trainer.step
        undone = self.client.rewind(step or None)
        if undone.num_groups:
            print(f"{undone.num_groups} groups were read but not trained on; they are ready again", flush=True)
        self.history.cut(step)
        self.client.set_weight_version(step)

    def step(self) -> None:
        """Read a batch, train on it, and load the new model into the engine."""
        began_s = time.monotonic()
        batch = self._next_batch()
        self.trainer.train(batch)
        step = self.trainer.step
        # The order matters. Killed before `save`, the batch is read again; killed after it, the model has seen it.
        self.client.checkpoint(step)
        self.history.add(make_entry(step, batch, time.monotonic() - began_s))
        folder = self.trainer.save(self.models, self.num_models)
        self.client.update_weights(step, folder)

    def _next_batch(self) -> Batch:
        trouble = ""
        while True:
            self.check_alive()
            batch = self.client.read(num_groups=self.num_groups, wait_s=POLL_S, step=self.trainer.step + 1)
            if batch is not None:
                return batch
            if not trouble and (trouble := self._trouble()):
                print(trouble, flush=True)

    def _trouble(self) -> str:
        """The reason for a missing batch; empty if it only takes time. Raises ``RunEnded`` if the run has ended."""
        run = self.client.stats()
        if run.state in OVER:
            raise RunEnded(run.run_id, f"{run.state}: {run.reason.strip().rpartition(chr(10))[2]}")
        if run.is_waiting_for_engine:
            return "The run is waiting for its engine, at the address that it was started with."
        if run.alarm is None:
            return ""
        equal = "(A group whose rewards are all equal is invalid: nothing can be learnt from it.)"
        return f"No batch so far: {run.alarm.message}. {equal}"


def attach(client: BufferClient, folder: Path, engine_url: str, step: int, options: argparse.Namespace) -> None:
    """Attach to the run of this folder, or start one. A run that ended before the first step is replaced."""
    mine = client.runs(RUN_NAME)
    if mine and (step or mine[-1].state not in OVER):
        client.attach(mine[-1].run_id)
        return
    batch_size = options.num_groups * options.group_size
    client.start(
        "math",
        group_size=options.group_size,
        input_file=write_sums(folder / "sums.jsonl"),
        name=RUN_NAME,
        remote_engine_url=engine_url,
        num_epoch=PLENTY_OF_EPOCHS,
        shuffle_seed=options.seed,
        num_process=options.num_process,
        num_reward_workers=2,
        sampling_params={"max_tokens": 12, "temperature": 1.0, "logprobs": True, "return_token_ids": True},
        max_staleness=MAX_STALENESS,
        # The batch being trained on and half of the next: groups generated further ahead have older weights.
        max_buffer_size=batch_size + batch_size // 2,
    )


def write_sums(path: Path) -> Path:
    """Write a hundred sums of two digits."""
    sums = [(left, right) for left in range(10) for right in range(10)]
    rows = [
        {"instance_id": f"{left}+{right}", "prompt": question(left, right), "label": str(left + right)}
        for left, right in sums
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def newest_model(models: Path, engine_url: str | None) -> Path:
    """The newest visible model: at first a copy of the engine's model, or of the built-in one."""
    models.mkdir(parents=True, exist_ok=True)
    if not model_folders(models):
        draft = models / ".first"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(served_model(engine_url) if engine_url else ensure_model(), draft)
        draft.rename(step_folder(models, 0))
    return model_folders(models)[-1]


def run(options: argparse.Namespace) -> History:
    """Start all parts, and train up to ``options.steps``."""
    folder: Path = options.dir.resolve()
    model_folder = newest_model(folder / "models", options.engine)
    step = int(model_folder.name.rpartition("-")[2])
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    trainer = Trainer(model_folder, Recipe(seed=options.seed), step)
    history = History(folder / "history.jsonl")
    with Children() as children:
        services = Services(folder, children)
        engine_url = options.engine or services.start_engine(model_folder)
        # Before the server starts: its run resumes at once, and its samples must have the right weight version.
        update_engine(engine_url, model_folder, step)
        try:
            with BufferClient(services.start_server(), retry_for_s=RETRY_FOR_S) as client:
                attach(client, folder, engine_url, step, options)
                parts = (client, trainer, history, folder / "models")
                sizes = (options.num_groups, options.keep_models)
                train(Loop(*parts, *sizes, services.check_alive), options.steps)
        except ForebayError:
            services.check_alive()  # a process that has ended is a better message than one that does not answer
            raise
    return history


def train(loop: Loop, num_steps: int) -> None:
    """Train step by step, and show the curve."""
    loop.resume()
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while loop.trainer.step < num_steps:
            if console.is_terminal:
                live.update(draw(loop.history, f"step {loop.trainer.step + 1} of {num_steps}"), refresh=True)
            loop.step()
            if not console.is_terminal:
                print(describe(loop.history.entries[-1]), flush=True)
        if console.is_terminal:
            live.update(draw(loop.history, "done"), refresh=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the loop. Returns 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    options.dir = options.dir or Path(tempfile.mkdtemp(prefix="forebay-rl-"))
    way_on = f"Start it again with --dir {options.dir} to resume."
    try:
        with alone_in(options.dir):
            print(f"Everything is kept in {options.dir}", flush=True)
            history = run(options)
            save_picture(history, options.dir / "reward.png")
    except KeyboardInterrupt:
        print(f"Interrupted. {way_on}", file=sys.stderr)
        return 130
    except InvalidInput as error:
        return _report(error, 2)
    except (RunEnded, CheckpointNotFound) as error:
        return _report(error, 1, "The run of this folder cannot be resumed. Start over with another --dir.")
    except ForebayError as error:
        return _report(error, 1, way_on)
    gain = "" if history.gain is None else f": the last five steps are {history.gain:+.3f} above the first five"
    print(f"{len(history.entries)} steps{gain}. The curve is {options.dir / 'reward.png'}")
    return 0


def _report(error: ForebayError, code: int, way_out: str = "") -> int:
    print("\n".join(filter(None, [error.message, error.hint, way_out])), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="folder for all files, to resume from; default: a new folder in /tmp")
    parser.add_argument("--steps", type=_count, default=25)
    parser.add_argument("--seed", type=int, default=0, help="seed for the order of the sums and the minibatches")
    parser.add_argument(
        "--engine",
        type=lambda url: url.rstrip("/"),
        help="address of an SGLang server that can read --dir; default: the tiny engine",
    )
    parser.add_argument("--num-groups", type=_count, default=32, help="groups per step")
    parser.add_argument("--group-size", type=_count, default=16)
    parser.add_argument("--num-process", type=_count, default=64, help="number of concurrent rollouts")
    parser.add_argument("--keep-models", type=_at_least_two, default=NUM_KEPT, help="number of newest models to keep")
    return parser


def _count(text: str, least: int = 1) -> int:
    if (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least} (got {number})")
    return number


def _at_least_two(text: str) -> int:
    return _count(text, 2)  # an engine may still be reading the second newest


if __name__ == "__main__":
    sys.exit(main())
