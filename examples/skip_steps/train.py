"""A training loop that generates its rollouts once: their results are dumped, and loaded when it runs again.

Run it twice, with a synchronous loop or a stream of samples::

    python examples/skip_steps/train.py --dump-dir /tmp/rollouts            # executes 4 rollouts
    python examples/skip_steps/train.py --dump-dir /tmp/rollouts            # executes none
    python examples/skip_steps/train.py --dump-dir /tmp/rollouts --stream
"""

import argparse
import asyncio
import random
from pathlib import Path
from typing import Any

from forebay.replay.skip import SkipManager

PROMPTS = ["17 + 25", "9 * 12", "3 - 10", "144 / 12"]


class Engine:
    """A stand-in for an expensive engine: it samples different answers each time, and counts its calls."""

    def __init__(self) -> None:
        self.num_executed = 0

    @SkipManager.annotate(role="rollout")
    def generate_batch(self, prompts: list[str], num_samples: int) -> list[dict[str, Any]]:
        """All answers of one training step, dumped as one unit."""
        self.num_executed += 1
        return [sample(prompt) for prompt in prompts for _ in range(num_samples)]

    @SkipManager.annotate(role="async_rollout")
    async def generate_one(self, prompt: str, sample_id: str) -> dict[str, Any]:
        """One answer of a stream, identified by its id."""
        self.num_executed += 1
        await asyncio.sleep(0.01)
        return {"id": sample_id, **sample(prompt)}


def sample(prompt: str) -> dict[str, Any]:
    """A random answer in the form of an engine's."""
    tokens = [random.randrange(1000) for _ in range(8)]
    return {"prompt": prompt, "tokens": tokens, "logprobs": [-random.random() for _ in tokens]}


def train_steps(engine: Engine, num_steps: int) -> list[float]:
    """Generate a batch and train on it in each step."""
    losses = []
    for step in range(1, num_steps + 1):
        SkipManager.set_step(step)
        losses.append(loss(engine.generate_batch(PROMPTS, num_samples=2)))
    return losses


async def train_stream(engine: Engine, num_samples: int) -> list[float]:
    """Generate samples concurrently, and train on each of them."""
    calls = [engine.generate_one(PROMPTS[index % len(PROMPTS)], f"sample_0_{index}") for index in range(num_samples)]
    return [loss([answer]) for answer in await asyncio.gather(*calls)]


def loss(answers: list[dict[str, Any]]) -> float:
    """A stand-in for training that depends on every token and logprob."""
    return sum(
        token * logprob for each in answers for token, logprob in zip(each["tokens"], each["logprobs"], strict=True)
    )


def main() -> None:
    """Train, and print the losses and the number of executed rollouts."""
    parser = argparse.ArgumentParser(description="Train, and generate nothing twice.")
    parser.add_argument("--dump-dir", type=Path, required=True)
    parser.add_argument("--action", choices=["cache", "repeat"], default="cache")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--stream", action="store_true", help="generate single samples instead of whole steps")
    arguments = parser.parse_args()
    role = {
        "enable": True,
        "dump_dir": str(arguments.dump_dir),
        "steps": list(range(arguments.steps + 1)),
        "action": arguments.action,
    }
    SkipManager.init(
        {
            "trainer": {"experiment_name": "sums", "project_name": "stream" if arguments.stream else "steps"},
            "data": {"train_batch_size": len(PROMPTS)},
            "skip": {"async_rollout" if arguments.stream else "rollout": role},
        }
    )
    engine = Engine()
    if arguments.stream:
        losses = asyncio.run(train_stream(engine, arguments.steps))
    else:
        losses = train_steps(engine, arguments.steps)
    print(" ".join(f"{each:.6f}" for each in losses))
    print(f"{engine.num_executed} rollouts executed")


if __name__ == "__main__":
    main()
