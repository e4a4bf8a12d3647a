"""A group with something to see: forks between siblings, a failure, a retry, hostile texts, and a trainer's numbers."""

import json
from typing import Any

import numpy

from forebay.client import BufferClient
from tests.browser.planted import HOSTILE
from tests.kit import Json, NativeRun, ServerProcess, make_sample

PROMPT = list(range(100, 110))
ODD = {"toString": 0}
"""JavaScript cannot make it a primitive value."""
SAMPLED = [-0.1, -0.2, -0.3, -0.1]


def messages(*answers: str) -> list[Json]:
    """Turns with a tool call each; every text but the answers is hostile."""
    found = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": "Fix the bug"}]
    for answer in answers:
        call = {"function": {"name": HOSTILE, "arguments": HOSTILE}}
        found.append({"role": "assistant", "content": answer, "tool_calls": [call], "reasoning_content": HOSTILE})
        found.append({"role": "tool", "name": HOSTILE, "content": f"output {HOSTILE}"})
    return found


def rollout(slot: int, reward: Any, tail: list[int], answers: tuple[str, str], **changes: Any) -> Json:
    """A sample of two turns: 4 sampled tokens, 3 of a tool, and the rest sampled by newer weights.

    A reward of ``...`` is none.
    """
    num, rest = len(PROMPT) + len(tail), len(tail) - 7
    spans = [
        {"source": "environment", "start": 0, "end": 10},
        {"source": "llm", "start": 10, "end": 14, "weight_version": 1},
        {"source": "tool", "start": 14, "end": 17},
        {"source": "llm", "start": 17, "end": num, "weight_version": 2},
    ]
    sample = {
        "uid": f"rollout/{slot}",
        "instance_id": HOSTILE,
        "epoch": 0,
        "slot": slot,
        "reward": reward,
        "tokens": PROMPT + tail,
        "loss_mask": [0] * 10 + [1] * 4 + [0] * 3 + [1] * rest,
        "logprobs": [0.0] * 10 + SAMPLED + [0.0] * 3 + [-0.5] * rest,
        "token_spans": spans,
        "messages": messages(*answers),
        "for_reward": {HOSTILE: HOSTILE},
        "extra_info": {"finish_reason": HOSTILE, "timings": {"total": 3.5}},
    }
    return make_sample(**(sample | changes))


def plant_group(server: ServerProcess, text: str = HOSTILE) -> NativeRun:
    """A delivered group whose trainer annotated one sample, and its instance's next epoch, which is open.

    ``text`` stands where the texts of others would be.
    """
    run = server.start_run(name="parting", group_size=5, min_valid_group_size_ratio=0.4, min_valid_item_size_ratio=0.4)
    surprising = [0.0] * 10 + [-0.1, -0.2, -3.3, -0.1] + [0.0] * 3 + [-0.5] * 3
    error = {"type": "ConnectError", "message": f"refused {HOSTILE}", "traceback": f"Traceback {HOSTILE}"}
    no_tokens = dict.fromkeys(("tokens", "loss_mask", "logprobs", "token_spans"), ...)
    samples = [
        rollout(0, 1.0, [1, 2, 3, 4, 20, 21, 22, 5, 6, 7], ("Let me grep", "cat setup.py")),
        rollout(1, 0.0, [1, 2, 3, 4, 20, 21, 22, 5, 9, 9, 9], ("Let me grep", "pip install"), attempt=1),
        rollout(2, 0.5, [1, 2, 8, 4, 20, 21, 22, 5, 6, 7], ("Let me try", "pytest"), logprobs=surprising),
        _odd(
            rollout(3, 0.25, [1, 2, 3, 4, 20, 23, 22, 5, 6, 7], ("Let me grep", "exit"), reward_parts={"exact": 0.25})
        ),
        rollout(4, ..., [], ("", ""), status="failed", error=error, outcome="engine_failure", **no_tokens),
    ]
    run.write(*(_with_text(sample, text) for sample in samples))
    batch = run.read(num_groups=1, step=41, wait_s=10)
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        wrong = numpy.linspace(-2, 0, 20, dtype=numpy.float32)
        client.annotate("rollout/2", {"trainer_logprobs": wrong, "loss": 0.125}, step=41, batch=batch["batch_id"])
    run.ack(batch)
    run.write(_with_text(rollout(0, 1.0, [1, 2], ("again", ""), uid="next/0", epoch=1), text))
    return run


def _odd(sample: Json) -> Json:
    """With objects where numbers and words are expected."""
    sample["messages"][-2]["tool_calls"][0]["function"]["name"] = ODD
    sample["messages"].append({"role": ODD, "name": ODD, "content": "", "tool_calls": [{"function": {"name": ODD}}]})
    spans = [{**span, "source": ODD, "weight_version": ODD} for span in sample["token_spans"][2:3]]
    changes = {
        "logprobs": [ODD, *sample["logprobs"][1:]],
        "attempt": ODD,
        "token_spans": [*sample["token_spans"], *spans],
    }
    return {**sample, **changes, "extra_info": {"finish_reason": ODD, "timings": {"total": ODD}}}


def _with_text(sample: Json, text: str) -> Json:
    as_json = [json.dumps(each)[1:-1] for each in (HOSTILE, text)]
    replaced: Json = json.loads(json.dumps(sample).replace(*as_json))
    return replaced
