"""Scores answers to sums on a group of workers, stage by stage, and computes advantages among each question's answers.

It reads like a script of one process. One argument decides where its methods run::

    python examples/worker_group/score_answers.py --backend inline       # in this process, for a debugger
    python examples/worker_group/score_answers.py --backend processes
    python examples/worker_group/score_answers.py --backend ray
"""

import argparse
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from forebay.workers.groups import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register

ANSWERS = Path(__file__).with_name("answers.jsonl")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Scorer(Worker):
    """Scores answers. Each instance is created in its own process."""

    def __init__(self, most_words: int) -> None:
        self.most_words = most_words
        self.num_scored = 0

    @register(Dispatch.ONE_TO_ALL)
    def load(self, tolerance: float) -> str:
        """Prepare the worker. Slow initialisation, or one that needs the worker's machine, runs once per worker."""
        self.tolerance = tolerance
        return f"worker {self.rank} of {self.world_size} on {self.node}"

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def final_numbers(self, texts: list[str]) -> list[float | None]:
        """The last number of each answer."""
        found = [NUMBER.findall(text) for text in texts]
        return [float(numbers[-1]) if numbers else None for numbers in found]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rewards(self, numbers: list[float | None], expected: list[float]) -> list[float]:
        """1.0 for a right answer, else 0.0."""
        self.num_scored += len(numbers)
        pairs = zip(numbers, expected, strict=True)
        return [float(number is not None and abs(number - right) <= self.tolerance) for number, right in pairs]

    @register(Dispatch.MAP)
    def length_penalty(self, text: str, weight: float) -> float:
        """The penalty of one answer: an idle worker takes the next one."""
        return weight * max(len(text.split()) - self.most_words, 0)

    @register(Dispatch.ONE_TO_ALL)
    def scored(self) -> tuple[int, int]:
        """The number of answers that this worker has scored, and its process id."""
        return self.num_scored, os.getpid()


def score(rows: list[dict[str, Any]], scorers: WorkerGroup) -> list[float]:
    """Run the stages. Plain values pass between them, which a debugger can inspect here."""
    texts = [row["answer"] for row in rows]
    numbers = scorers.final_numbers(texts)  # a call in progress, which the next stage waits for
    rewards = scorers.rewards(numbers, [row["expected"] for row in rows])
    print(f"{sum(rewards):g} of {len(rows)} answers are right")
    for index, penalty in scorers.length_penalty(texts, weight=0.1):  # as they finish
        rewards[index] -= penalty
    return rewards


def advantages(rows: list[dict[str, Any]], rewards: list[float]) -> list[float]:
    """Each reward relative to the rewards of the same question, as in GRPO; this stage needs no workers."""
    by_question: dict[str, list[float]] = defaultdict(list)
    for row, reward in zip(rows, rewards, strict=True):
        by_question[row["question"]].append(reward)
    of_question = {question: (mean(group), pstdev(group) or 1.0) for question, group in by_question.items()}
    standing = [of_question[row["question"]] for row in rows]
    return [(reward - middle) / spread for reward, (middle, spread) in zip(rewards, standing, strict=True)]


def main() -> None:
    """Read the answers, score them, and print the results."""
    parser = argparse.ArgumentParser(description="Score answers on a group of workers.")
    parser.add_argument("--backend", choices=["inline", "processes", "ray"], default="processes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.answers.read_text(encoding="utf-8").splitlines()]
    pool = ResourcePool([arguments.workers], cpus=0.25)  # on one machine; Ray reserves this share of a CPU for each
    with WorkerGroup(pool, ClassWithInitArgs(Scorer, most_words=8), backend=arguments.backend) as scorers:
        print("\n".join(scorers.load(tolerance=0.01)))
        rewards = score(rows, scorers)
        for row, reward, advantage in zip(rows, rewards, advantages(rows, rewards), strict=True):
            print(f"{row['question']:>8}  {reward:5.2f}  {advantage:+5.2f}  {row['answer']}")
        counts, processes = zip(*scorers.scored(), strict=True)
        print(f"scored {sum(counts)} answers in {len(set(processes))} processes: {', '.join(map(str, counts))}")


if __name__ == "__main__":
    main()
