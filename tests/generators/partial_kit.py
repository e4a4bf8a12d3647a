"""What the tests of turns that are cut share: scripts that say exactly these tokens, and what must come of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, decode, encode, encode_chat
from forebay.generators.base import BaseGenerator, single_turn

PROMPT = [{"role": "user", "content": "a"}]
PROMPT_IDS = encode_chat(PROMPT)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Reply):
    """An answer of these tokens, which need not be the whole characters of a text."""

    ids: Sequence[int] = ()

    def tokens(self) -> list[int]:
        return list(self.ids)


def saying(text: str, cuts: Sequence[int] = (), **reply: Any) -> Callable[[ScriptedCall], Reply]:
    """A script that says ``text`` from wherever it is told to go on, with an abort at each byte in ``cuts``."""
    ids = [*encode(text), TURN_END]

    def answer(call: ScriptedCall) -> Reply:
        done = len(call.prompt_ids) - len(PROMPT_IDS)
        cut = next((cut for cut in cuts if cut > done), None)
        finish_reason = "abort" if cut is not None else "stop"
        said = ids[done:cut]
        return Tokens(ids=said, text=decode(said), **{"finish_reason": finish_reason, **reply})

    return answer


async def reward(item: Json) -> float:
    return 1.0


async def sample_of(
    script: Any, buffer: Any, write_rows: Any, rollout: Any = single_turn, **options: Any
) -> tuple[Json, list[Json]]:
    """The one sample of a run against ``script``, and the bodies of the chats that it took."""
    bodies, (sample,) = await samples_of(script, buffer, write_rows, rollout, **options)
    return sample, bodies


async def samples_of(
    script: Any,
    buffer: Any,
    write_rows: Any,
    rollout: Any = single_turn,
    kind: type[ScriptedEngine] = ScriptedEngine,
    **options: Any,
) -> tuple[list[Json], list[Json]]:
    """The bodies of the chats of one rollout against ``script``, and its samples."""
    buffer.plan |= {"group_size": 1}
    async with kind(script) as engine, asyncio.timeout(30):
        generator = BaseGenerator(engine.url, buffer.url, **{"max_tokens": 64, **options})
        await generator.run_async(write_rows({"instance_id": "a", "prompt": "a"}), rollout, reward)
    return [call.body for call in engine.calls], buffer.samples


def check_tokens(sample: Json, sampled: list[int], prompt: list[int] = PROMPT_IDS) -> None:
    """The sample is the prompt and exactly these tokens, each with its logprob, in spans without gaps."""
    assert sample["tokens"] == prompt + sampled
    assert sample["loss_mask"] == [0] * len(prompt) + [1] * len(sampled)
    assert len(sample["logprobs"]) == len(sample["tokens"])
    assert all(logprob < 0 for logprob in sample["logprobs"][len(prompt) :])
    spans = sample["token_spans"]
    assert all(before["end"] == after["start"] for before, after in pairwise(spans))
    assert (spans[0]["start"], spans[-1]["end"]) == (0, len(sample["tokens"]))


async def run_rows(buffer: Any, write_rows: Any, engine: ScriptedEngine, rows: list[Json], rollout: Any) -> None:
    """Run one rollout for each row, many at once."""
    async with asyncio.timeout(30):
        generator = BaseGenerator(engine.url, buffer.url, num_process=len(rows))
        await generator.run_async(write_rows(*rows), rollout, reward)
