"""A process that runs rollouts of four turns, with and without a trace in turn, and prints the CPU seconds of each.

``python -m tests.benchmarks.traced_rollouts ENGINE_URL BUFFER_URL FOLDER NUM_ROUNDS NUM_ROLLOUTS``.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from forebay.generators.base import BaseGenerator, single_turn
from forebay.telemetry.tracing.tracer import TraceSettings, start_tracing

NUM_TURNS = 4
RUN_ID = "run-0123456789ab"


async def rollout(client: Any, messages: list[Any], params: dict[str, Any]) -> Any:
    """Question and answer, four times."""
    for number in range(NUM_TURNS - 1):
        messages, _ = await single_turn(client, messages, params)
        messages = [*messages, {"role": "user", "content": f"And then, for the {number}th time?"}]
    return await single_turn(client, messages, params)


async def reward(_: dict[str, Any]) -> float:
    """Costs nothing."""
    return 1.0


async def one_round(urls: tuple[str, str], rows: Path, folder: Path, *, is_traced: bool) -> float:
    """CPU seconds of a passage over the rows, whichever thread used them."""
    generator = BaseGenerator(*urls, run_id=RUN_ID, num_process=8, max_attempts=1)
    began_s = time.process_time()
    if is_traced:
        tracer = start_tracing(TraceSettings(folder=str(folder / "trace"), run_id=RUN_ID), "run")
        await generator.run_async(rows, rollout, reward)
        tracer.close()
    else:
        await generator.run_async(rows, rollout, reward)
    return time.process_time() - began_s


async def main(engine_url: str, buffer_url: str, folder: Path, num_rounds: int, num_rollouts: int) -> None:
    """A round that warms up, then pairs."""
    rows = folder / "rows.jsonl"
    prompt = "Tell me of the river. " * 20
    rows.write_text("".join(f"{json.dumps({'instance_id': n, 'prompt': prompt})}\n" for n in range(num_rollouts)))
    urls = (engine_url, buffer_url)
    await one_round(urls, rows, folder, is_traced=True)
    pairs = []
    for number in range(num_rounds):
        # The one that is first has the caches of the one before it: they take turns in that as well.
        order = (True, False) if number % 2 else (False, True)
        used = {is_traced: await one_round(urls, rows, folder, is_traced=is_traced) for is_traced in order}
        pairs.append((used[False], used[True]))
    print(json.dumps(pairs))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
