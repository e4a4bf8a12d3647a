"""Train again on the batches of some steps of a loop, without an engine: they are replayed from the loop's data.

    python examples/grpo_loop/loop.py --dir /tmp/rl --steps 5 --keep-models 6
    python examples/grpo_loop/replay_steps.py --dir /tmp/rl --steps 3-5

The second command begins with the model of step 2 and ends with that of step 5, bit for bit. Change the trainer to see
how the model changes.
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
    """Train on the steps again. Returns whether the model equals the loop's."""
    first, last = options.steps
    source = step_folder(options.dir / "models", first - 1)
    if not source.is_dir():
        hint = "run loop.py with --keep-models; by default it keeps the newest three models"
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
            print(f"step {step}: trained on {len(batch.rows)} samples again", flush=True)
    shutil.rmtree(step_folder(options.to, last), ignore_errors=True)  # left over from an earlier replay
    options.to.mkdir(parents=True, exist_ok=True)
    folder = trainer.save(options.to, sys.maxsize)
    return _are_alike(folder, step_folder(options.dir / "models", last))


@contextmanager
def _replayed(options: argparse.Namespace) -> Iterator[BufferClient]:
    """A client attached to a run that replays the steps, on a server with the loop's data."""
    first, last = options.steps
    with Children() as children, BufferClient(Services(options.dir, children).start_server()) as client:
        source = client.runs(RUN_NAME)[-1].run_id
        client.start(name="replayed-steps", replay={"source": source, "steps": f"{first}-{last}"})
        yield client


def _are_alike(new: Path, recorded: Path) -> bool:
    """Whether two folders have the same weights, bit for bit. Prints the result."""
    if not recorded.is_dir():
        print(f"The model is {new}. The loop's model of this step was deleted.")
        return True
    are_same = (new / "model.safetensors").read_bytes() == (recorded / "model.safetensors").read_bytes()
    print(f"The model is {new}. It {'equals' if are_same else 'differs from'} {recorded}, compared bit for bit.")
    return are_same


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        steps = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps such as 3-5") from None
    if not 1 <= steps[0] <= steps[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps: they begin at 1, the larger one last")
    return steps


def main(arguments: list[str] | None = None) -> int:
    """Replay. Returns 0 if the model is equal or there is none to compare, 1 if it differs, 2 for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder of a loop that is not running")
    parser.add_argument("--steps", type=_steps, required=True, help="steps to train on, for example 3-5")
    parser.add_argument("--to", type=Path, help="folder for the new model; default: replayed/ in --dir")
    parser.add_argument("--seed", type=int, default=0, help="the loop's --seed")
    parser.add_argument("--num-groups", type=int, default=32, help="the loop's --num-groups")
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
