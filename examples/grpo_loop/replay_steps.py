"""Train once more on the batches of some steps of a loop, with no engine: they are replayed out of its data.

    python examples/grpo_loop/loop.py --dir /tmp/rl --steps 5 --keep-models 6
    python examples/grpo_loop/replay_steps.py --dir /tmp/rl --steps 3-5

The second begins with the model of step 2, and ends with that of step 5, bit for bit. Change the trainer, and see by
how much that moves it.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from loop import RUN_NAME
from services import Services, alone_in
from trainer import Recipe, Trainer, step_folder

from forebay.client import BufferClient
from forebay.core.errors import ForebayError, InvalidInput, RunEnded
from forebay.server.cli.demo.children import Children

WAIT_S = 60.0


def replay(options: argparse.Namespace) -> bool:
    """Train on the steps again; whether the model is the one that the loop had."""
    first, last = options.steps
    source = step_folder(options.dir / "models", first - 1)
    if not source.is_dir():
        hint = "give loop.py --keep-models: it keeps the newest three, if nothing else is said"
        raise InvalidInput(f"the model of step {first - 1} is not in {source.parent}", hint=hint)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    trainer = Trainer(source, Recipe(seed=options.seed), first - 1)
    with _replayed(options) as client:
        for step in range(first, last + 1):
            batch = client.read(num_groups=options.num_groups, wait_s=WAIT_S, step=step)
            if batch is None:
                raise RunEnded(client.run_id, f"no batch for step {step} within {WAIT_S:g} s")
            trainer.train(batch)
            client.ack(batch)
            print(f"step {step}: {len(batch.rows)} samples once more", flush=True)
    shutil.rmtree(step_folder(options.to, last), ignore_errors=True)  # of an earlier replay
    options.to.mkdir(parents=True, exist_ok=True)
    folder = trainer.save(options.to, sys.maxsize)
    return _are_alike(folder, step_folder(options.dir / "models", last))


@contextmanager
def _replayed(options: argparse.Namespace) -> Iterator[BufferClient]:
    """A server on the loop's data, and a client of a run that replays the steps."""
    first, last = options.steps
    with Children() as children, BufferClient(Services(options.dir, children).start_server()) as client:
        source = client.runs(RUN_NAME)[-1].run_id
        client.start(name="replayed-steps", replay={"source": source, "steps": f"{first}-{last}"})
        yield client


def _are_alike(new: Path, recorded: Path) -> bool:
    """Whether two folders have the same weights, bit for bit; says so."""
    if not recorded.is_dir():
        print(f"The model is {new}. That of the loop is not kept any more.")
        return True
    are_same = (new / "model.safetensors").read_bytes() == (recorded / "model.safetensors").read_bytes()
    print(f"The model is {new}: {'the same as' if are_same else 'another than'} {recorded}, bit for bit.")
    return are_same


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        steps = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps; for example 3-5") from None
    if not 1 <= steps[0] <= steps[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of steps; the first is 1, and the larger one comes last"
        )
    return steps


def main(arguments: list[str] | None = None) -> int:
    """Replay: 0 where the model is the same or nothing is there to compare, 1 where it differs, 2 for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="of a loop that is not running")
    parser.add_argument("--steps", type=_steps, required=True, help="for example 3-5")
    parser.add_argument("--to", type=Path, help="where the folder of the new model goes; else replayed/ in --dir")
    parser.add_argument("--seed", type=int, default=0, help="as the loop had it")
    parser.add_argument("--num-groups", type=int, default=32, help="groups of a step, as the loop had it")
    options = parser.parse_args(arguments)
    options.dir = options.dir.resolve()
    options.to = options.to or options.dir / "replayed"
    try:
        with alone_in(options.dir):
            return 0 if replay(options) else 1
    except ForebayError as error:
        print("\n".join(filter(None, [error.message, error.hint])), file=sys.stderr)
        return 2 if isinstance(error, InvalidInput) else 1


if __name__ == "__main__":
    sys.exit(main())
